"""The cost of the service around the model: the null engine against a bare grpc.aio server.

Four servers run at the same time and serve the same callers in turns, so that other load on the
machine affects all of them. `bare` answers with messages recorded from ours, without looking at the
request. `tuned` is the same server with our settings of the interpreter and the kernel. `inside` is
our service with the null engine in its own process, and `legato` our service with the engine in a
process of its own. Callers, service and engine share the cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks import record
from benchmarks.serve import ghz_check, processes, sessions
from benchmarks.serve.contenders import (
    Contender,
    Sample,
    echo_server,
    inside_server,
    median,
    null_server,
    recorded,
    share_of,
    take_turn,
)
from benchmarks.serve.load import Case, cases


def compare(
    case: Case, contenders: Sequence[Contender], arguments: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Take turns of all contenders, `arguments.rounds` times after a warm-up."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        take_turn(case, contender, 1.0, arguments.senders)
    for _ in range(arguments.rounds):
        for contender in contenders:
            sample = take_turn(case, contender, arguments.seconds, arguments.senders)
            samples[contender.name].append(sample)
            print(f"{case.title}, {contender.name}: {sample.per_second:.0f}/s", file=sys.stderr)
    return samples


def row(case: Case, samples: dict[str, list[Sample]]) -> list[str]:
    """Format the medians of all turns; shares are medians of the paired ratios."""

    def of(name: str, field: str) -> float:
        return median(samples[name], field)

    def share(name: str) -> str:
        return f"{share_of(samples['bare'], samples[name]):.0%}"

    return [
        case.title,
        case.counted,
        f"{of('bare', 'per_second'):.0f}",
        f"{of('tuned', 'per_second'):.0f}",
        *(f"{of('inside', 'per_second'):.0f}", share("inside")),
        *(f"{of('legato', 'per_second'):.0f}", share("legato")),
        *(f"{of(name, 'cpu_us'):.1f}" for name in ("bare", "tuned", "inside", "legato")),
        f"{of('legato', 'engine_cpu_us'):.1f}",
        f"{of('legato', 'messages_per_request'):.1f}",
    ]


HEADS = (
    *("request", "counted", "bare a second", "tuned", "inside", "share", "legato", "share"),
    *("CPU us: bare", "tuned", "inside", "service", "engine", "messages a request"),
)


def main(argv: Sequence[str]) -> int:
    """Start the servers, measure in turns, record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks serve", description=__doc__)
    parser.add_argument("--name", default="serve", help="of the record")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server")
    parser.add_argument("--senders", type=int, default=1, help="processes that ask")
    parser.add_argument("--length", type=int, default=200, help="answers of a stream")
    parser.add_argument("--only", default="", help="the cases whose title holds this")
    parser.add_argument(
        "--sessions", type=int, nargs="*", default=[100, 1000, 5000], help="idle ones, and none"
    )
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[], help="numbers of service processes"
    )
    arguments = parser.parse_args(argv)
    asked = [case for case in cases(arguments.length) if arguments.only in case.title]
    with null_server() as ours:
        answers = recorded(ours.target, asked)
        with (
            echo_server(answers) as bare,
            echo_server(answers, tuned=True) as tuned,
            inside_server() as inside,
        ):
            contenders = (bare, tuned, inside, ours)
            samples = {case.title: compare(case, contenders, arguments) for case in asked}
            asks = ghz_check.NAME in answers.unary
            ghz = ghz_check.measure({each.name: each.target for each in contenders if asks})
    scaled = processes.measure(
        echo_server(answers),
        null_server,
        asked,
        arguments.processes,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
    )
    idle = sessions.measure(null_server, arguments.sessions)
    figures = {
        "cases": {
            case.title: {
                name: [dataclasses.asdict(turn) for turn in turns]
                for name, turns in samples[case.title].items()
            }
            for case in asked
        },
        "processes": [dataclasses.asdict(each) for each in scaled],
        "ghz": ghz,
        "idle_sessions": idle,
    }
    tables = [record.table(HEADS, [row(case, samples[case.title]) for case in asked])]
    tables += [
        "",
        *processes.text(scaled),
        "",
        *ghz_check.text(ghz),
        "",
        *sessions.text(idle),
    ]
    title = "The service around the null engine, and a bare grpc.aio server"
    record.write(arguments.name, title, figures, tables)
    return 0
