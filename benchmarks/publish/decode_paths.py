"""Tables and a chart of decode paths, and of speculation while acceptance changes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.publish.records import Records, Row, sources
from benchmarks.record import table

_LENGTH = 256  # tokens of the answer that launches are counted for
NAMES = {
    "blocking": "blocking loop",
    "graph": "two launches in flight",
    "loop": "decode loop",
    "resident": "megakernel",
}
_LAUNCHES = "h200/loops"  # one run of all paths
_ADAPTING = ("fixed:3", "seed", "budget")
_PARTS_CALLERS = 8
_PATHS_CALLERS = (1, 8)  # turns of 64 were cut off, and their CPU is divided by too many answers
_MIXTURES = ("known image, 10 objects",)  # half of the lists were empty
_CHANGES = ("mixed", "changing", "under pressure")


def counts(records: Records) -> dict[str, Row]:
    """Return launches and waits of one answer by decode path."""
    row = records.row(_LAUNCHES, streams=1)
    return {name: row[name] for name in NAMES}


def launches(records: Records) -> str:
    """Format launches and waits of an answer, the step, and the host's CPU."""
    rows = [
        [
            NAMES[name],
            round(each["launches"]),
            round(each["waits"]),
            f"{each['ms']:.3f}",
            f"{each['host_us']:.0f}",
        ]
        for name, each in counts(records).items()
    ]
    heads = (
        f"one answer of {_LENGTH} tokens, after its second",
        "decode launches",
        "waits of the host for one",
        "step, ms",
        "host CPU a token, us",
    )
    return table(heads, rows) + sources(records, _LAUNCHES)


def loop_steps(records: Records) -> str:
    """Format each path's steps by rows, and how soon a request joins eight running answers."""
    figures, rows = records.figures(_LAUNCHES), []
    for name, words in NAMES.items():
        cells = [f"{row[name]['ms']:.3f}" for row in figures["rows"]]
        cells += [f"{row[name]['ms']:.3f}" for row in figures["lists"] if row["streams"] == 8]
        joins = [join["answered"] for join in figures["join_ms"].get(name, ())]
        cells.append(f"{statistics.median(joins):.2f}" if joins else "-")
        rows.append([words, *cells])
    heads = (
        "step, ms",
        *(f"{row['streams']} row{'s' if row['streams'] > 1 else ''}" for row in figures["rows"]),
        "8 lists about one image",
        "a request joins: first token, median ms",
    )
    return table(heads, rows) + sources(records, _LAUNCHES)


def parts(records: Records) -> str:
    """Chunked prefill beside eight callers who ask again at once."""
    rows = []
    for row in records.rows("h200/parts"):
        if row["callers"] != _PARTS_CALLERS:
            continue
        cells = []
        for field, decimals in (("tokens_per_s", 0), ("first_token_ms", 1), ("gap_p99_ms", 1)):
            for kind in ("whole", "parts"):
                value = statistics.median(turn[field] for turn in row[kind])
                cells.append(f"{value:,.{decimals}f}")
        rows.append([f"{row['whole'][0]['prompt_tokens']:,.0f}", *cells])
    heads = (
        f"prompt tokens, {_PARTS_CALLERS} callers",
        *("tokens/s, whole", "tokens/s, chunked", "first token ms, whole"),
        *("first token ms, chunked", "P99 between tokens ms, whole", "chunked"),
    )
    return table(heads, rows) + sources(records, "h200/parts")


def decode_paths(records: Records) -> str:
    """Whole servers of both paths in turns."""
    rows = []
    for row in records.rows("h100/paths"):
        if row["request"] in _MIXTURES or row["callers"] not in _PATHS_CALLERS:
            continue
        cells = []
        for field in ("p50", "per_second", "engine_ms"):
            for path in ("graph", "loop"):
                value = statistics.median(turn[field] for turn in row["turns"][path])
                cells.append(f"{value:.1f}" if field != "engine_ms" else f"{value:.2f}")
        rows.append([row["request"], row["callers"], *cells])
    heads = (
        *("one H100, through gRPC", "callers", "graph, P50 ms", "loop, P50 ms"),
        *("graph, answers/s", "loop, answers/s", "graph, engine CPU ms", "loop, engine CPU ms"),
    )
    return table(heads, rows) + sources(records, "h100/paths")


def changing(records: Records) -> str:
    """Policies while acceptance changes and where pages are short."""
    rows = []
    for load in _CHANGES:
        off = _eight(records, load, "off")
        for setting in ("off", *_ADAPTING):
            row = _eight(records, load, setting)
            phase = "decode_tokens_per_second"
            rows.append(
                [
                    *(load, setting, f"{row[phase] / off[phase]:.2f}"),
                    f"{row['tokens_per_verify']:.2f}",
                    f"{row['mean_block_size']:.2f}",
                    f"{row['block_size_variance']:.2f}",
                    *(f"{row[key]:.0%}" for key in ("kv_peak", "kv_hit_rate", "fragmentation")),
                    str(row["preemptions"]),
                ]
            )
    heads = (
        *("8 streams, one H100", "", "decode phase", "tokens a verify", "mean block"),
        *("variance", "KV peak", "KV hits", "wasted draft pages", "preemptions"),
    )
    return table(heads, rows) + sources(records, "h100/speculation_changing")


def _eight(records: Records, load: str, setting: str) -> Row:
    wanted = {"workload": load, "streams": 8, "setting": setting}
    return records.row("h100/speculation_changing", **wanted)


TABLES: dict[str, Callable[[Records], str]] = {
    "changing": changing,
    "decode_paths": decode_paths,
    "launches": launches,
    "loop_steps": loop_steps,
    "parts": parts,
}
