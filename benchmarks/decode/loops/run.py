"""Decode loops, by a WHILE node and in the resident kernel, beside a launch for every step.

One model, one run.

    python -m benchmarks loops --device cuda --model moondream2 --random-weights

`step`: milliseconds of a decode step of `--streams` answers, by wall time from the last first token
to the first last one. `host`: microseconds of CPU of the whole process for a token of one answer.
`launches`, `waits`: decodes of one answer, and waits of the host for one to end. `same tokens`:
whether all are the graph's, in every run. `blocking` is the graph with one launch at a time.
`join`: how long a request that arrives while others decode waits for its prompt to begin on the
device, and for its first token. `tokens/s` under load are medians of runs in turns. `--steps` of
short answers of every skill, with random lengths, arrivals and aborts, are compared with each
other: tokens, values and log-probabilities depend on the question alone. With `--late` warps of the
resident kernel sleep at random around every wait and signal.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.process import freeze_loaded

from benchmarks import record, shared_options
from benchmarks.decode.loops.arrivals import MAX_LIVE, Join, joins, load, randomly
from benchmarks.decode.loops.steps import lists_of, steps_of
from benchmarks.speculation.run import with_settings

PATHS = ("graph", "loop", "resident")
"""The last one only where the kernel runs."""
STEPS = {
    "blocking": ("graph", 1),
    "graph": ("graph", 2),
    "loop": ("loop", 2),
    "resident": ("resident", 2),
}
"""Decode path and launches in flight by the names of steps."""
LOAD_TURNS = 4


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    assemblies = _assemblies(arguments)
    figures = _figures(assemblies, arguments)
    assemblies["graph"].device.close()
    record.write(arguments.name, "Decode loops", figures, _tables(figures))
    different = any(each["different"] for each in figures["random"].values())
    same = all(row["identical"] for row in (*figures["rows"], *figures["lists"]))
    return 0 if same and not different else 1


def _assemblies(arguments: argparse.Namespace) -> dict[str, Assembly]:
    """One model with each path, the graph first."""
    most = max(arguments.streams) + 1
    config = msgspec.structs.replace(
        model_config(arguments),
        max_running=most,
        max_waiting=2 * most + MAX_LIVE,
        crops_per_launch=0,
    )
    graph = assemble(config)
    # The folder may have been removed.
    from legato_engine.kernels.megakernel import offer
    from legato_engine.kernels.megakernel.kernel import MegakernelBuild

    late = functools.partial(MegakernelBuild, delays=arguments.late)
    with mock.patch.object(offer, "MegakernelBuild", late):
        others = {path: with_settings(graph, decode_path=path) for path in PATHS[1:]}
    if not others["resident"].runner.megakernel_rows:  # loops stand in for it
        del others["resident"]
    freeze_loaded()
    return {"graph": graph, **others}


def _figures(assemblies: dict[str, Assembly], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the figures of the record."""

    def answers(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return steps_of(assembly, streams, arguments.length, arguments.context, depth)

    def lists(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return lists_of(assembly, streams, arguments.length // 3, depth)

    rows, list_rows = (
        [_row(assemblies, streams, arguments.repeats, run) for streams in arguments.streams]
        for run in (answers, lists)
    )
    waits = {
        path: joins(assembly, 1, arguments.joins, arguments.context)
        for path, assembly in assemblies.items()
        if arguments.joins
    }
    loads = [
        _loads(assemblies, callers, callers * arguments.load, lists=lists)
        for lists in (False, True)
        for callers in arguments.streams
        if arguments.load
    ]
    return {
        "model": msgspec.to_builtins(assemblies["graph"].info),
        "rows": rows,
        "lists": list_rows,
        "join_ms": {path: [each._asdict() for each in taken] for path, taken in waits.items()},
        "loads": loads,
        "random": {
            path: randomly(assembly, arguments.steps, seed=1)
            for path, assembly in assemblies.items()
            if path != "graph" and arguments.steps
        },
    }


def _tables(figures: dict[str, Any]) -> list[str]:
    works = ("answers", "rows"), ("lists", "lists")
    steps = [(what, row) for what, of in works for row in figures[of]]
    differing = [
        f"{what} of {row['streams']} streams by {name}"
        for what, row in steps
        for name in STEPS
        if name in row and not row[name]["same_tokens"]
    ]
    tokens = "all paths gave the same tokens" if not differing else "other tokens: "
    totals = figures["random"]
    tables = [
        (("of", "streams", *STEPS), [_step_cells(what, row) for what, row in steps]),
        (
            ("path", "prompt begins, P50 and slowest ms", "first token"),
            [(path, *_join_cells(taken)) for path, taken in figures["join_ms"].items()],
        ),
        (
            ("callers ask for", "callers", "graph, tokens/s", *list(STEPS)[2:]),
            [_load_cells(row) for row in figures["loads"]],
        ),
        (
            ("path", *totals.get("loop", ())),
            [(path, *each.values()) for path, each in totals.items()],
        ),
    ]
    note = (
        f"Steps: ms (host CPU of a token, us); {tokens}{', '.join(differing)}. "
        "The JSON file has launches and waits."
    )
    return ["\n\n".join([note, *(record.table(heads, rows) for heads, rows in tables if rows)])]


def _row(
    assemblies: dict[str, Assembly],
    streams: int,
    repeats: int,
    run_once: Callable[[Assembly, int, int], dict[str, Any]],
) -> dict[str, Any]:
    """Medians over runs in turns."""
    runs: dict[str, list[dict[str, Any]]] = {
        name: []
        for name, (path, _) in STEPS.items()
        if path in assemblies
        and (path != "resident" or streams <= assemblies[path].runner.megakernel_rows)
    }
    for repeat in range(repeats + 1):
        for name in list(runs) if repeat % 2 else reversed(runs):
            path, depth = STEPS[name]
            runs[name].append(run_once(assemblies[path], streams, depth))
    tokens = runs["graph"][0]["tokens"]
    same = {name: all(run["tokens"] == tokens for run in taken) for name, taken in runs.items()}
    row: dict[str, Any] = {"streams": streams, "identical": all(same.values())}
    for path, all_runs in runs.items():
        kept = all_runs[1:]
        row[path] = {
            what: statistics.median(run[what] for run in kept)
            for what in ("ms", "host_us", "launches", "waits")
        }
        row[path]["all_ms"] = [run["ms"] for run in kept]
        row[path]["same_tokens"] = same[path]
    return row


def _loads(
    assemblies: dict[str, Assembly], callers: int, num_tokens: int, *, lists: bool
) -> dict[str, Any]:
    """Tokens a second of each path, in turns."""
    taken: dict[str, list[float]] = {path: [] for path in assemblies}
    for turn in range(LOAD_TURNS):
        for path in assemblies if turn % 2 else reversed(assemblies):
            taken[path].append(load(assemblies[path], callers, num_tokens, lists=lists))
    return {"callers": callers, "lists": lists, **taken}


def _join_cells(taken: Sequence[dict[str, float]]) -> Iterator[str]:
    for what in Join._fields:
        waits = [each[what] for each in taken]
        yield f"{statistics.median(waits):.2f} {max(waits):.2f}"


def _load_cells(row: dict[str, Any]) -> tuple[object, ...]:
    graph, *others = (
        statistics.median(row[path]) if path in row else None for path in list(STEPS)[1:]
    )
    cells = [f"{own:.0f} ({own / graph:.3f})" if own else "-" for own in others]
    return "lists" if row["lists"] else "answers", row["callers"], f"{graph:.0f}", *cells


def _step_cells(what: str, row: dict[str, Any]) -> tuple[object, ...]:
    cells = [f"{row[n]['ms']:.3f} ({row[n]['host_us']:.0f})" if n in row else "-" for n in STEPS]
    return what, row["streams"], *cells


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="loops", help="of the record")
    parser.add_argument(
        "--streams", default=[1, 8, 32], type=shared_options.numbers, help="e.g. 1,8,32"
    )
    shared_options.add_equal_answers(parser)
    parser.add_argument("--joins", default=30, type=int, help="requests that join; 0: none")
    parser.add_argument(
        "--load", default=600, type=int, help="tokens of a caller in each run under load"
    )
    parser.add_argument("--steps", default=20_000, type=int, help="of answers that come and go")
    parser.add_argument("--late", action="store_true", help="warps of the resident kernel sleep")
    return parser.parse_args(argv)
