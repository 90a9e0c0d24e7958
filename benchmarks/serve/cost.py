"""The cost of the service around the model: the null engine against a bare grpc.aio server.

Four servers run at the same time and serve the same callers in turns, so that other load on the
machine affects all of them. `bare` answers with messages recorded from ours, without looking at the
request. `tuned` is the same server with our settings of the interpreter and the kernel. `inside` is
our service with the null engine in its own process, and `legato` our service with the engine in a
process of its own. Callers, service and engine share the cores. Several service processes and idle
sessions are measured too, when asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from typing import Any

import grpc
from legato.v1 import inference_pb2, session_pb2, task_pb2
from legato_client._errors import from_rpc_error
from legato_client.load.plan import LoadPlan
from legato_client.load.run import run

from benchmarks import record
from benchmarks.serve import ghz_check, load
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
    scaled = measure_processes(
        echo_server(answers),
        null_server,
        asked,
        arguments.processes,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
    )
    idle = measure_sessions(null_server, arguments.sessions)
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
        *processes_text(scaled),
        "",
        *ghz_check.text(ghz),
        "",
        *sessions_text(idle),
    ]
    title = "The service around the null engine, and a bare grpc.aio server"
    record.write(arguments.name, title, figures, tables)
    return 0


# ---------------------------------------------------------------- several processes
# Throughput of several service processes with one scheduler, from the same callers.

SENDERS = 4
"""Connections for each process of the largest number: the kernel spreads these, not calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """Medians of one case with `processes` service processes; 0 is the bare server.

    CPU is in microseconds of what is counted; `share` is relative to the bare server in the turn
    before.
    """

    case: str
    processes: int
    share: float
    per_second: float
    p50_ms: float
    service_cpu_us: float  # of all service processes together
    engine_cpu_us: float
    engine_share: float  # of one core


def measure_processes(
    bare: AbstractContextManager[Contender],
    server: Callable[[Sequence[str]], AbstractContextManager[Contender]],
    asked: Sequence[Case],
    counts: Sequence[int],
    *,
    seconds: float,
    rounds: int,
) -> list[Scaled]:
    """Measure every case in turns: the bare server, then ours with every number of processes."""
    if not counts:
        return []
    found: list[Scaled] = []
    with ExitStack() as running:
        contenders = {0: running.enter_context(bare)}
        for count in counts:
            contenders[count] = running.enter_context(server(("--processes", str(count))))
        time.sleep(1.0)  # worker processes may still be starting
        for case in asked:
            grown = dataclasses.replace(case, in_flight=case.in_flight * max(counts))
            turns: dict[int, list[Sample]] = {count: [] for count in contenders}
            for _ in range(rounds + 1):
                for count, contender in contenders.items():
                    turns[count].append(take_turn(grown, contender, seconds, SENDERS * max(counts)))
            found += _scaled(case.title, {count: each[1:] for count, each in turns.items()})
    return found


def _scaled(case: str, turns: dict[int, list[Sample]]) -> list[Scaled]:
    return [
        Scaled(
            case=case,
            processes=count,
            share=share_of(turns[0], own),
            per_second=median(own, "per_second"),
            p50_ms=median(own, "p50_ms"),
            service_cpu_us=median(own, "cpu_us"),
            engine_cpu_us=median(own, "engine_cpu_us"),
            engine_share=median(own, "engine_share"),
        )
        for count, own in turns.items()
    ]


def processes_text(found: Sequence[Scaled]) -> list[str]:
    """Format the figures as Markdown."""
    if not found:
        return ["Several processes were not measured."]
    rows = [
        [
            *(each.case, each.processes or "bare", f"{each.per_second:.0f}"),
            f"{each.share:.0%}",
            f"{each.p50_ms:.2f}",
            *(f"{value:.1f}" for value in (each.service_cpu_us, each.engine_cpu_us)),
            f"{each.engine_share:.0%}",
        ]
        for each in found
    ]
    times = ("a second", "of bare", "P50 ms")
    heads = ("request", "processes", *times, "CPU us: service", "engine", "engine's core")
    return ["Several service processes before one engine:", record.table(heads, rows)]


# ---------------------------------------------------------------- idle sessions
# Memory of each, and the latency of other calls.

RATE, SECONDS, WARM_UP = 200.0, 8.0, 2.0
_PER_CONNECTION = 250
_QUERY = "/legato.v1.InferenceService/Query"
_SESSION = "/legato.v1.SessionService/Session"
_SETTLE = 2.0  # seconds from the last opened session to the first measurement


def measure_sessions(
    server: Callable[[], AbstractContextManager[Contender]], counts: Sequence[int]
) -> list[dict[str, float]]:
    """Measure the latency of Query at a fixed rate without and with idle sessions.

    Ends with the first count that the server refuses; empty when no counts are given.
    """
    found: list[dict[str, float]] = []
    for count in (0, *counts) if counts else ():
        with server() as contender:
            before = load.resident(contender.pid)
            try:
                with holding(contender.target, count):
                    memory = (load.resident(contender.pid) - before) / count if count else 0.0
                    found.append(_latency(contender, count) | {"bytes_each": memory})
            except SessionsRefused as refused:
                print(f"{count} idle sessions and more are left out: {refused}")
                break
    return found


def _latency(contender: Contender, count: int) -> dict[str, float]:
    plan = LoadPlan(
        target=contender.target,
        kind="unary",
        path=_QUERY,
        request=inference_pb2.QueryRequest(question="What is it?").SerializeToString(),
        rate=RATE,
        seconds=SECONDS,
        warm_up=WARM_UP,
    )
    used, since = load.seconds(contender.pid), time.monotonic()
    seen = run(plan)
    share = (load.seconds(contender.pid) - used) / (time.monotonic() - since)
    latency = seen.latency.summary_ms()
    return {"sessions": count, "service_cpu_share": share, "failed": seen.errors.total(), **latency}


def sessions_text(found: Sequence[dict[str, float]]) -> list[str]:
    """Format the figures as Markdown."""
    if not found:
        return ["Idle sessions were not measured."]
    rows = [
        [
            f"{each['sessions']:.0f}",
            *(f"{each[name]:.2f}" for name in ("p50", "p99", "max")),
            f"{each['p50'] - found[0]['p50']:+.2f}",
            f"{each['p99'] - found[0]['p99']:+.2f}",
            f"{each['bytes_each'] / 1024:.1f}",
            f"{each['service_cpu_share']:.1%}",
        ]
        for each in found
    ]
    times = ("P50 ms", "P99 ms", "max ms", "P50 added", "P99 added")
    heads = ("idle sessions", *times, "KiB each", "service CPU")
    return [
        f"Query, {RATE:g} a second (open loop), beside idle sessions:",
        record.table(heads, rows),
    ]


class SessionsRefused(Exception):
    """The server opens no sessions; the message is its reason."""


@contextlib.contextmanager
def holding(target: str, count: int) -> Iterator[None]:
    """Hold idle sessions open in a process of its own.

    Raises:
        SessionsRefused: The server does not open them.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    holder = spawn.Process(target=_hold, args=(there, target, count), daemon=True)
    holder.start()
    there.close()
    try:
        refused = here.recv()
        if refused:
            raise SessionsRefused(refused)
        time.sleep(_SETTLE)
        yield
    finally:
        holder.terminate()
        holder.join()


def _hold(pipe: Connection, target: str, count: int) -> None:
    """Open the sessions and keep them; send "" when all are open, else the reason."""
    asyncio.run(_hold_all(pipe, target, count))


async def _hold_all(pipe: Connection, target: str, count: int) -> None:
    task = task_pb2.Task(task_id="a", caption=task_pb2.CaptionTask())
    opening = session_pb2.SessionRequest(open=session_pb2.SessionOpen(standing_tasks=[task]))
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [
        grpc.aio.insecure_channel(target, options=own)
        for _ in range(math.ceil(count / _PER_CONNECTION))
    ]
    readers = []
    try:
        for index in range(count):
            call: Any = channels[index // _PER_CONNECTION].stream_stream(
                _SESSION,
                request_serializer=session_pb2.SessionRequest.SerializeToString,
            )()
            await call.write(opening)
            if await call.read() is grpc.aio.EOF:
                raise SessionsRefused((await call.code()).name)
            readers.append(asyncio.create_task(_read(call)))
    except grpc.RpcError as error:
        known = from_rpc_error(error)
        pipe.send(known.reason or known.code)
    except SessionsRefused as refused:
        pipe.send(str(refused))
    else:
        pipe.send("")
    await asyncio.Event().wait()  # until it is terminated


async def _read(call: Any) -> None:
    """Read heartbeats, so that the server never waits for this client."""
    while await call.read() is not grpc.aio.EOF:
        pass
