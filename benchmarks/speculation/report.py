"""The record of the benchmark: tables, plots and series."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.plots import Line, Panel, write_svg
from benchmarks.speculation.workloads import PROFILES

Row = dict[str, Any]
_ADAPTIVE = ("seed", "budget")
_COLUMNS = 2
_SHOWN = 8  # requests of a row


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write the record, its plots and their series; return the path of the Markdown."""
    model, rows = figures["model"], figures["rows"]
    title = f"Speculation: {model['name']} ({model['dtype']}) on {model['device']}"
    series = [row.pop("series") for row in rows]
    names = [f"{name}_{kind}.svg" for kind in _PLOTS]
    images = [f"![{kind}]({each})" for kind, each in zip(_PLOTS, names, strict=True)]
    parts = [
        *_note(model["device"]),
        *("## Speed", "", _speed(rows), "", "## Proposals and pages", "", _pages(rows), ""),
        *("## Blocks that requests settle at", "", _settled(rows), ""),
        *("## Over the time of a run, the most streams", "", *images),
    ]
    path = record.write(name, title, figures, parts)
    drawn = [{**row, "series": each} for row, each in zip(rows, series, strict=True)]
    most = max(row["streams"] for row in rows)
    drawn = [row for row in drawn if row["streams"] == most]
    for file, draw in zip(names, _PLOTS.values(), strict=True):
        write_svg(path.parent / file, list(draw(drawn)), columns=_COLUMNS)
    kept = [
        {**{key: row[key] for key in ("workload", "streams", "setting")}, **row["series"]}
        for row in drawn
    ]
    text = json.dumps(kept, separators=(",", ":"), default=float)
    (path.parent / f"{name}_series.json").write_text(text + "\n")
    return path


# ---------------------------------------------------------------- tables


def _note(device: str) -> list[str]:
    if not device.startswith("cpu"):
        return []
    return [
        "Counts are exact. Times are of a machine with other work. A CPU computes tokens in blocks "
        "of eight, so that up to eight cost what one does.",
        "",
    ]


def _speed(rows: Sequence[Row]) -> str:
    rates = ("tokens_per_second", "decode_tokens_per_second")
    plain = {_load(row): [row[key] for key in rates] for row in rows if row["setting"] == "off"}
    heads = (
        "tokens/s",
        "gain",
        "decoding",
        "gain",
        "forward ms",
        "sample ms",
        "tick us",
        "first token ms",
    )
    gaps = ("p50", "p95", "p99")
    return record.table(
        (*_HEAD, *heads, *(f"gap {gap} ms" for gap in gaps), "identical"),
        [
            [
                *_head(row),
                *(
                    text
                    for key, without in zip(rates, plain[_load(row)], strict=True)
                    for text in (f"{row[key]:.0f}", f"{row[key] / without:.2f}")
                ),
                *(f"{row['forward_ms']:.3f}", f"{row['sample_ms']:.3f}", f"{row['tick_us']:.0f}"),
                f"{row['first_token_ms']['p50']:.1f}",
                *(f"{row['gap_ms'][gap]:.2f}" for gap in gaps),
                "yes" if row["identical"] else "NO",
            ]
            for row in rows
        ],
    )


def _pages(rows: Sequence[Row]) -> str:
    rates = ("tokens per verify", "accepted", "right of tried, %", "tried")
    heads = (*rates, "mean block", "variance", "KV hits", "wasted drafts")
    return record.table(
        (*_HEAD, *heads, "KV peak", "preempted"),
        [
            [
                *_head(row),
                f"{row['tokens_per_verify']:.2f}",
                f"{row['acceptance']:.0%}",
                right_text(row["right"], row["right_within"]) if row["num_tried"] else "",
                row["num_tried"],
                f"{row['mean_block_size']:.2f}",
                f"{row['block_size_variance']:.2f}",
                *(f"{row[key]:.0%}" for key in ("kv_hit_rate", "fragmentation", "kv_peak")),
                row["preemptions"],
            ]
            for row in rows
        ],
    )


def _settled(rows: Sequence[Row]) -> str:
    """Mean blocks over the last quarter of the first requests, for adaptive policies."""
    return record.table(
        (*_HEAD, "by request"),
        [
            [*_head(row), ", ".join(f"{size:.1f}" for size in row["settled_blocks"][:_SHOWN])]
            for row in rows
            if row["setting"] in _ADAPTIVE
        ],
    )


def right_text(right: float, within: Sequence[float]) -> str:
    """A share and half of its confidence interval, in hundredths: 40.1 \u00b1 0.9."""
    return f"{100 * right:.1f} \u00b1 {50 * (within[1] - within[0]):.1f}"


_HEAD = ("workload", "streams", "setting")


def _head(row: Row) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in _HEAD)


def _load(row: Row) -> tuple[str, int]:
    return row["workload"], row["streams"]


# ---------------------------------------------------------------- plots


def _blocks(rows: Sequence[Row]) -> Iterator[Panel]:
    return _by_request(rows, "tokens proposed", 1)


def _averages(rows: Sequence[Row]) -> Iterator[Panel]:
    return _by_request(rows, "average acceptance", 2)


def _by_request(rows: Sequence[Row], y_name: str, field: int) -> Iterator[Panel]:
    for row in rows:
        if row["setting"] in _ADAPTIVE:
            lines = [
                Line(
                    _named(row["workload"], i),
                    [(point[0], point[field]) for point in points],
                    steps=True,
                )
                for i, points in enumerate(row["series"]["blocks"][:_SHOWN])
            ]
            yield Panel(f"{row['workload']}: {row['setting']}", "ms", y_name, lines)


def _named(workload: str, index: int) -> str:
    """By the rate of its draft tokens, where requests differ in it."""
    profile = PROFILES.get(workload)
    if profile is None or len(profile.rates) == 1:
        return f"request {index}"
    rate = profile.rates[index % len(profile.rates)]
    return " ".join(f"{each:g}" for each in np.atleast_1d(rate))


def _pressure(rows: Sequence[Row]) -> Iterator[Panel]:
    return _by_setting(rows, "ms", "share of KV pages", lambda row: row["series"]["kv_use"])


def _latency(rows: Sequence[Row]) -> Iterator[Panel]:
    return _by_setting(
        rows,
        "percentile",
        "ms between tokens",
        lambda row: list(enumerate(row["series"]["gaps_ms"])),
    )


def _by_setting(
    rows: Sequence[Row], x_name: str, y_name: str, points: Callable[[Row], Sequence[Any]]
) -> Iterator[Panel]:
    for workload in dict.fromkeys(row["workload"] for row in rows):
        lines = [Line(r["setting"], points(r)) for r in rows if r["workload"] == workload]
        yield Panel(workload, x_name, y_name, lines)


_PLOTS: dict[str, Callable[[Sequence[Row]], Iterator[Panel]]] = {
    "blocks": _blocks,
    "acceptance": _averages,
    "pressure": _pressure,
    "latency": _latency,
}
