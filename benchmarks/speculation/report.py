"""The record of the benchmark: tables, plots and series."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from legato_engine.config import SPECULATION_OFF
from legato_engine.core.assembly import Assembly
from legato_engine.core.process import freeze_loaded
from legato_engine.errors import InvalidField
from legato_engine.kernels.proposer import UNKNOWN, Proposer
from legato_engine.sequence import Sequence as EngineSequence

from benchmarks import record
from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.run import Figures, Run, with_settings
from benchmarks.speculation.workloads import (
    FEWEST,
    PROFILES,
    REAL,
    at_once,
    cache_for,
    rates_of,
    real_requests,
    sample_images,
    synthetic_requests,
    text_requests,
)

# ---------------------------------------------------------------- plots

# Line charts as SVG, panels in a grid: enough for records, and nothing to install.

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 24, 34
_LEGEND = 18
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6f4c9b", "#00798c", "#8d5524", "#444444")
_TICKS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of `x`; `steps` holds each value until the next."""

    label: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Lines over the same axes, which begin at 0; lines of one label have one colour."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]


def write_svg(path: Path, panels: Sequence[Panel], *, columns: int) -> None:
    """Write the panels row by row, with one legend below for all of them."""
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="10" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % columns * _WIDTH, index // columns * _HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel, colours), "</g>"]
    parts += _legend(labels, colours, height - _LEGEND / 2)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    points = [point for line in panel.lines for point in line.points] or [(1.0, 1.0)]
    x_end, x_ticks = _axis(max(x for x, _ in points))
    y_end, y_ticks = _axis(max(y for _, y in points))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / x_end * (right - _LEFT), bottom - y / y_end * (bottom - _TOP)

    parts = [_text(_WIDTH / 2, 14, panel.title, "middle", bold=True)]
    for tick in x_ticks:
        at, _ = place(tick, 0)
        parts += [_rule(at, _TOP, at, bottom), _text(at, bottom + 12, f"{tick:g}", "middle")]
    for tick in y_ticks:
        _, at = place(0, tick)
        parts += [_rule(_LEFT, at, right, at), _text(_LEFT - 4, at + 3, f"{tick:g}", "end")]
    parts.append(_text((_LEFT + right) / 2, bottom + 26, panel.x_name, "middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 12 {middle:.0f})"'
    parts.append(_text(12, middle, panel.y_name, "middle", turned))
    for line in panel.lines:
        shape = _path([place(*point) for point in line.points], steps=line.steps)
        if shape:
            parts.append(
                f'<path d="{shape}" fill="none" stroke="{colours[line.label]}" stroke-width="1.3"/>'
            )
    return parts


def _axis(most: float) -> tuple[float, list[float]]:
    """Where an axis from 0 ends, and its ticks: round numbers, the last at or above `most`."""
    if not most > 0:
        return 1.0, [0.0, 1.0]
    rough = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    count = math.ceil(most / step - 1e-9)
    return step * count, [step * i for i in range(count + 1)]


def _path(points: Sequence[tuple[float, float]], *, steps: bool) -> str:
    if not points:
        return ""
    (x, y), *rest = points
    moves = [f"M{x:.1f} {y:.1f}"]
    for x, y in rest:
        moves.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return "".join(moves)


def _legend(labels: Sequence[str], colours: dict[str, str], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for label in labels:
        parts.append(
            f'<path d="M{x:.0f} {y:.0f}h14" stroke="{colours[label]}" stroke-width="2.5"/>'
        )
        parts.append(_text(x + 18, y + 3, label, "start"))
        x += 30 + 6 * len(label)
    return parts


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#ddd" stroke-width="0.6"/>'


def _text(
    x: float, y: float, words: str, anchor: str, extra: str = "", *, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight} {extra}>'
        f"{escape(words)}</text>"
    )


# ---------------------------------------------------------------- report

Row = dict[str, Any]
_ADAPTIVE = ("seed", "budget")
_COLUMNS = 2
_SHOWN = 8  # requests of a row


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write the record, its plots and their series; return its path."""
    model, rows = figures["model"], figures["rows"]
    title = f"Speculation: {model['name']} ({model['dtype']}) on {model['device']}"
    series = [row.pop("series") for row in rows]
    names = [f"{name}_{kind}.svg" for kind in _PLOTS]
    images = [f"![{kind}]({each})" for kind, each in zip(_PLOTS, names, strict=True)]
    parts = [
        *_note(model["device"]),
        *_tables(rows),
        *(_REST, ""),
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

_REST = (
    "The figures also have step times, latencies, rates with their confidence intervals, "
    "variances and last sizes of blocks, KV pages and preemptions."
)


def _note(device: str) -> list[str]:
    if not device.startswith("cpu"):
        return []
    return [
        "Counts are exact. Times are of a machine with other work. A CPU computes tokens in blocks "
        "of eight, so that up to eight cost what one does.",
        "",
    ]


def _tables(rows: Sequence[Row]) -> list[str]:
    """Return gains of settings side by side; `figures` has all others."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    off = {_load(row): row for row in rows if row["setting"] == "off"}
    by_load: dict[tuple[str, int], dict[str, Row]] = {load: {} for load in off}
    for row in rows:
        by_load[_load(row)][row["setting"]] = row
    parts = []
    for title, rate, beside in (
        ("## Decode phase: tokens/s against off (tokens a verify)", "decode_tokens_per_second", 0),
        ("## Whole requests: tokens/s against off (accepted)", "tokens_per_second", 1),
    ):
        cells = [
            [*load, f"{off[load][rate]:.0f}"]
            + [_gain(by.get(each), off[load], rate, beside) for each in settings if each != "off"]
            for load, by in by_load.items()
        ]
        heads = ("workload", "streams", "off", *settings[1:])
        parts += [title, "", record.table(heads, cells), ""]
    different = [" ".join(_head(row)) for row in rows if not row["identical"]]
    tokens = "Tokens are the same as without speculation"
    return [*parts, f"{tokens}{', but for ' if different else '.'}{'; '.join(different)}", ""]


def _gain(row: Row | None, off: Row, rate: str, beside: int) -> str:
    if row is None:
        return "-"
    note = f"{row['acceptance']:.0%}" if beside else f"{row['tokens_per_verify']:.2f}"
    return f"{row[rate] / off[rate]:.2f} ({note})"


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


# ---------------------------------------------------------------- comparison
# Block sizes and policies next to plain decoding, on real and on synthetic requests.
#
# The same requests run once plainly and once with each setting, and their tokens are compared. Real
# requests are captions of images and questions about them, drafted by the engine's own proposer.
# Synthetic requests are drafted by an oracle, right at known rates, from the plain run's tokens.


SETTINGS = ("fixed:1", "fixed:2", "fixed:4", "fixed:8", "seed", "budget")
WORKLOADS = (REAL, *PROFILES)


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A workload: a factory of fresh requests, run `at_once` together (0: all)."""

    name: str
    make: Callable[[], list[EngineSequence]]
    at_once: int

    def run(self, assembly: Assembly, num_waves: int = 0) -> Run:
        requests = self.make()
        few = num_waves * self.at_once or len(requests)
        return Run(assembly, requests[:few], self.at_once)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; the fastest of `repeats` runs counts.

    `length` is that of synthetic answers, `context` the position of their first token (0: after the
    prompt). At least `fewest` requests run, in waves of as many as there are streams. `workloads`
    are `REAL` and names of `PROFILES`. `texts` are prompts by the names of further workloads, whose
    answers have at most `length` tokens.
    """

    streams: Sequence[int]
    length: int
    repeats: int
    settings: Sequence[str] = SETTINGS
    workloads: Sequence[str] = WORKLOADS
    context: int = 0
    fewest: int = FEWEST
    texts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def measure(assembly: Assembly, plan: Plan) -> list[Figures]:
    """Measure every workload and setting, plain decoding first.

    Raises:
        InvalidField: a setting or workload is unknown.
    """
    unknown = [name for name in plan.workloads if name not in (*WORKLOADS, *plan.texts)]
    if unknown:
        known = ", ".join((*WORKLOADS, *plan.texts))
        raise InvalidField(f"unknown workload {unknown[0]!r}; there are {known}", field="workloads")
    rows: list[Figures] = []
    for streams in plan.streams:
        config = msgspec.structs.replace(assembly.config, max_running=streams)
        some = dataclasses.replace(assembly, config=config)
        off = with_settings(some, speculation=SPECULATION_OFF)
        try:
            rows += _real(off, plan)
            rows += _synthetic(off, plan)
            rows += _texts(off, plan)
        finally:
            gc.unfreeze()
    return rows


def _real(off: Assembly, plan: Plan) -> list[Figures]:
    if REAL not in plan.workloads:
        return []
    make = partial(real_requests, off, sample_images(off))
    changed = ((setting, with_settings(off, speculation=setting)) for setting in plan.settings)
    load = _Load(REAL, make, 1 if off.config.max_running == 1 else 0)
    return _compare(off, _plain(off, load, plan), load, changed, plan)


def _texts(off: Assembly, plan: Plan) -> list[Figures]:
    """Real prompts, one stream at a time or all at once, with the engine's own proposer."""
    if not plan.texts:
        return []
    speculative = {setting: with_settings(off, speculation=setting) for setting in plan.settings}
    rows: list[Figures] = []
    for name, prompts in plan.texts.items():
        make = partial(text_requests, off, prompts, length=plan.length)
        load = _Load(name, make, 1 if off.config.max_running == 1 else 0)
        rows += _compare(off, _plain(off, load, plan), load, speculative.items(), plan)
    return rows


def _synthetic(off: Assembly, plan: Plan) -> list[Figures]:
    """Run the profiles with every setting; one oracle learns each profile's tokens in turn."""
    names = [name for name in plan.workloads if name in PROFILES]
    if not names:
        return []
    sizes = {"length": plan.length, "context": plan.context, "fewest": plan.fewest}
    loads = [
        _Load(
            name,
            partial(synthetic_requests, off, PROFILES[name], **sizes),
            at_once(off, PROFILES[name]),
        )
        for name in names
    ]
    most = max(len(load.make()) for load in loads)
    oracle, proposer = oracle_for(off, capacity=(most, off.model.max_context))
    speculative = {
        setting: with_settings(off, proposer, speculation=setting) for setting in plan.settings
    }
    rows: list[Figures] = []
    for load in loads:
        profile, requests = PROFILES[load.name], load.make()
        cramped = cache_for(off, profile, requests)
        plain = _plain(cramped, load, plan)
        known = list(map(_history, plain.sequences, plain.tokens))
        oracle.know(known, rates=rates_of(profile, requests))
        changed = (
            (setting, cache_for(each, profile, requests)) for setting, each in speculative.items()
        )
        rows += _compare(cramped, plain, load, changed, plan)
    return rows


def oracle_for(assembly: Assembly, capacity: tuple[int, int]) -> tuple[OracleProposer, Proposer]:
    """Make an oracle without known sequences, and its proposer for this device."""
    on = assembly.device.torch_device
    vocab_size = assembly.model.vocab_size
    oracle = OracleProposer([[UNKNOWN]], on, rates=[1.0], vocab_size=vocab_size, capacity=capacity)
    if on.type != "cuda":
        return oracle, oracle
    from benchmarks.speculation.oracle import OracleKernel

    return oracle, OracleKernel(*oracle.tables)


def _compare(
    off: Assembly,
    plain: Run,
    load: _Load,
    changed: Iterable[tuple[str, Assembly]],
    plan: Plan,
) -> list[Figures]:
    streams = off.config.max_running
    rows = [plain.figures(load.name, streams, SPECULATION_OFF, plain)]
    for setting, assembly in changed:
        run = _fastest(assembly, load, plan.repeats)
        rows.append(run.figures(load.name, streams, setting, plain))
    return rows


def _plain(off: Assembly, load: _Load, plan: Plan) -> Run:
    load.run(off, num_waves=1)  # warm-up
    return _fastest(off, load, plan.repeats)


def _fastest(assembly: Assembly, load: _Load, repeats: int) -> Run:
    freeze_loaded()
    return min((load.run(assembly) for _ in range(repeats)), key=lambda run: run.seconds)


def _history(sequence: EngineSequence, tokens: Sequence[int]) -> list[int]:
    return known_history(sequence.prefix_length, sequence.prompt, tokens)
