"""A run's records as the few figures that are compared: `python -m benchmarks summary FOLDER`.

Figures by number of streams are of `query` steps, pipelined; a step lasts from commit to commit.
`loop_ms` and `resident_ms` are steps of `query` by loops and by the resident kernel, for up to 8
streams. `portable_ms` are steps of PTX of compute_80 with packed weights, `device_memory_gib` is
beside the KV cache, of packed weights, `moondream3_e4m3_ms` have 8-bit keys and values,
`adapter_ms` is what one adapter of rank 8 adds. Gains are fractions: 0.1 is a tenth more tokens a
second. `tick_cpu_us_32` is of the slowest kind of task without drafts, `detect_over_text` of the
worst number of streams. `hop_ms` is of one blocking client, of three tokens, with the image sent as
bytes. Images are charts, except in figures whose names end with `_photo`. `sources` names the
record, the commit and the date of each figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Records = Mapping[str, Mapping[str, Any]]
STREAMS = (1, 8, 32)
RESIDENT_STREAMS = (1, 8)
DRAFTED = " tokens a row"  # ends the names of the tick's rows with draft tokens
OUTPUT = "summary.json"
PHOTOS, FP8_TOWER = "e2e_photos", "e2e_fp8"
PORTABLE = "portable_formats_ptx80"
FORMATS, FORMATS_KV8 = "portable_formats_hopper", "portable_formats_kv8_hopper"
MOONDREAM3 = "kernels_moondream3"

# The record of each figure.
SOURCES = {
    "decode_ms": "decode",
    "gpu_idle_ms": "decode",
    "gain_predicted": "decode",
    "gain_observed": "decode",
    "tick_cpu_us_32": "tick",
    "detect_over_text": "decode",
    "loop_ms": "loops",
    "resident_ms": "loops",
    "portable_ms": PORTABLE,
    "fp8_ms": FORMATS,
    "fp8_kv8_ms": FORMATS_KV8,
    "int4_kv8_ms": FORMATS_KV8,
    "device_memory_gib": FORMATS,
    "e2e_p50_ms_new": "e2e",
    "e2e_p50_ms_cached": "e2e",
    "req_per_s_64_new": "e2e",
    "req_per_s_64_mix": "e2e",
    "e2e_p50_ms_new_photo": PHOTOS,
    "req_per_s_64_new_photo": PHOTOS,
    "req_per_s_64_mix_photo": PHOTOS,
    "req_per_s_64_new_fp8": FP8_TOWER,
    "req_per_s_64_mix_fp8": FP8_TOWER,
    "moondream3_ms": MOONDREAM3,
    "moondream3_e4m3_ms": MOONDREAM3,
    "adapter_ms": "adapters",
    "hop_ms": "hop",
    "hop_ms_asyncio": "hop",
}


def summarise(records: Records) -> dict[str, Any]:
    """Summarise records by name; a figure without a record is None."""
    used = {name: records[name] for name in dict.fromkeys(SOURCES.values()) if name in records}
    facts = [record["surroundings"] for record in used.values()]
    gpu: list[str] = next((fact["gpu"].split(", ") for fact in facts if fact.get("gpu")), [])
    return {
        **_figures_of(records),
        "commit": _joined(fact.get("commit") for fact in facts),
        "date": max((fact["date"] for fact in facts), default=None),
        "torch": _joined(fact.get("torch") for fact in facts),
        "driver": gpu[1] if len(gpu) > 1 else None,
        "commands": [fact["command"] for fact in facts],
        "sources": {
            figure: {"record": name} | _origin(used[name])
            for figure, name in SOURCES.items()
            if name in used
        },
    }


def _figures_of(records: Records) -> dict[str, Any]:
    decode = {row["streams"]: row for row in _rows(records, "decode") if row["task"] == "query"}
    constrained = _figures(records, "decode").get("detect_over_text", ())
    return {
        "decode_ms": _by_streams(decode, lambda row: row["pipelined"]["period"]),
        "gpu_idle_ms": _by_streams(decode, lambda row: row["pipelined"]["idle"]),
        "gain_predicted": _by_streams(decode, lambda row: row["predicted"] - 1),
        "gain_observed": _by_streams(decode, lambda row: row["observed"] - 1),
        "tick_cpu_us_32": _largest(
            row["median_us"]
            for row in _rows(records, "tick")
            if row["streams"] == 32 and not row["tasks"].endswith(DRAFTED)
        ),
        "detect_over_text": _largest(row["detect_over_text"] for row in constrained),
        "loop_ms": _by_streams(_steps(records, "loop"), lambda row: row["loop"]["ms"]),
        "resident_ms": _by_streams(
            _steps(records, "resident"), lambda row: row["resident"]["ms"], RESIDENT_STREAMS
        ),
        "portable_ms": _formats(records, PORTABLE, "packed"),
        "fp8_ms": _formats(records, FORMATS, "fp8"),
        "fp8_kv8_ms": _formats(records, FORMATS_KV8, "fp8"),
        "int4_kv8_ms": _formats(records, FORMATS_KV8, "int4"),
        "device_memory_gib": _only(
            row["GiB"] for row in _rows(records, FORMATS) if row["weights"] == "packed"
        ),
        "e2e_p50_ms_new": _e2e(records, "new", 1, "p50"),
        "e2e_p50_ms_cached": _e2e(records, "cached", 1, "p50"),
        "req_per_s_64_new": _e2e(records, "new", 64, "per_second"),
        "req_per_s_64_mix": _e2e(records, "mix", 64, "per_second"),
        "e2e_p50_ms_new_photo": _e2e(records, "new", 1, "p50", PHOTOS),
        "req_per_s_64_new_photo": _e2e(records, "new", 64, "per_second", PHOTOS),
        "req_per_s_64_mix_photo": _e2e(records, "mix", 64, "per_second", PHOTOS),
        "req_per_s_64_new_fp8": _e2e(records, "new", 64, "per_second", FP8_TOWER),
        "req_per_s_64_mix_fp8": _e2e(records, "mix", 64, "per_second", FP8_TOWER),
        "moondream3_ms": _kernels(records, "moondream3"),
        "moondream3_e4m3_ms": _kernels(records, "moondream3-e4m3-kv8"),
        "adapter_ms": _adapters(records),
        "hop_ms": _hop(records, "hop_blocking_ms"),
        "hop_ms_asyncio": _hop(records, "hop_ms"),
    }


def missing(summary: Mapping[str, Any]) -> list[str]:
    """List the figures that are None; figures by number of streams as `name.streams`."""
    names = [name for name, value in summary.items() if value is None]
    for name, value in summary.items():
        if isinstance(value, dict):
            names += [f"{name}.{key}" for key, each in value.items() if each is None]
    return names


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Read every record of a folder, by name and in the order of names."""
    records = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and "surroundings" in document:
            records[path.stem] = document
    return records


def main(argv: Sequence[str]) -> int:
    """Write FOLDER/summary.json, and print missing figures and different commits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks summary", description=__doc__)
    parser.add_argument("folder", type=Path, help="with the records of one run")
    arguments = parser.parse_args(argv)
    summary = summarise(read(arguments.folder))
    text = json.dumps(summary, indent=1)
    (arguments.folder / OUTPUT).write_text(text + "\n")
    print(text)
    gaps = missing(summary)
    print(f"missing: {', '.join(gaps)}" if gaps else "nothing is missing")
    for name in ("commit", "torch"):
        if "," in (summary[name] or ""):
            print(f"records of several runs: {name} {summary[name]}")
    return 0


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record["surroundings"].get(name) for name in ("commit", "date")}


def _figures(records: Records, name: str) -> Mapping[str, Any]:
    figures: Mapping[str, Any] = records.get(name, {}).get("figures", {})
    return figures


def _rows(records: Records, name: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = _figures(records, name).get("rows", ())
    return rows


def _steps(records: Records, path: str) -> dict[int, Mapping[str, Any]]:
    """Rows of the loops' record that have steps of a decode path, by number of streams."""
    return {row["streams"]: row for row in _rows(records, "loops") if path in row}


def _by_streams(
    rows: Mapping[int, Mapping[str, Any]],
    figure: Callable[[Mapping[str, Any]], float],
    streams: Sequence[int] = STREAMS,
) -> dict[str, float | None]:
    return {str(n): figure(rows[n]) if n in rows else None for n in streams}


def _formats(records: Records, name: str, weights: str) -> dict[str, float | None]:
    """Return steps of one weight format, by number of rows."""
    rows = {row["rows"]: row for row in _rows(records, name) if row["weights"] == weights}
    return _by_streams(rows, lambda row: row["ms"])


def _kernels(records: Records, model: str) -> dict[str, float | None]:
    """Return a model's forward steps, by number of rows."""
    figures = _figures(records, MOONDREAM3)
    rows = {n: figures[name] for n in STREAMS if (name := f"{model} {n}x1") in figures}
    return _by_streams(rows, lambda row: row["step"])


def _adapters(records: Records) -> dict[str, float | None]:
    """Return what an adapter of rank 8 adds to a step of Moondream 2, by number of rows."""
    steps = {
        (row["rank"], row["streams"], row["adapters"]): row["step_ms"]
        for row in _rows(records, "adapters")
        if row["model"] == "moondream2"
    }
    added = {n: {"ms": steps[8, n, 1] - steps[0, n, 0]} for n in STREAMS if (8, n, 1) in steps}
    return _by_streams(added, lambda row: row["ms"])


def _e2e(
    records: Records, workload: str, callers: int, figure: str, name: str = "e2e"
) -> float | None:
    """Take a figure of answers of three tokens; a cell without completed calls has none."""
    wanted = (workload, callers, 3)
    return _only(
        row[figure]
        for row in _rows(records, name)
        if (row["workload"], row["callers"], row["tokens"]) == wanted and row["calls"]
    )


def _hop(records: Records, figure: str) -> float | None:
    """Take a figure of three tokens with the image sent as bytes."""
    return _only(
        row[figure]
        for row in _rows(records, "hop")
        if (row["picture"], row["tokens"]) == ("bytes", 3)
    )


def _only(values: Iterable[float]) -> float | None:
    return next(iter(values), None)


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _joined(values: Iterable[str | None]) -> str | None:
    return ",".join(sorted({value for value in values if value})) or None
