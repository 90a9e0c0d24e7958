"""What the service costs around the model: the null engine against a bare grpc.aio server.

Four servers run at the same time and are asked by the same callers, in turns, so that what else
the machine does meets all. `bare` says what was recorded from ours without looking at the question,
`tuned` is the same server asking of the interpreter and of the kernel what ours does, `inside` is
our service with the null engine in its own process, and `legato` the whole, with the engine in a
process of its own: on two cores, callers, service and engine share them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc, task_pb2
from legato_client.cli.local_server import LocalServer
from legato_client.load.plan import Plan
from legato_client.load.record import Record
from legato_client.load.run import run

from benchmarks import cpu, record, serve_ghz, serve_processes, serve_sessions
from benchmarks.echo import Answers
from benchmarks.rpc import picture

NULL = ("--model", "null", "--null-objects", "100000", "--max-sessions", "10000")
START_TIMEOUT = 60.0
SIZE = (640, 480)
_SERVICE = "/legato.v1.InferenceService/"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One kind of request; `name` is the RPC, `answers` how many of `counted` one request gets."""

    title: str
    name: str
    request: Message
    in_flight: int
    counted: str = "calls"
    answers: int = 1

    @property
    def streams(self) -> bool:
        """Whether messages are what is counted."""
        return self.name == "Generate"

    def plan(self, target: str, seconds: float, senders: int) -> Plan:
        """Closed loop: as much as the server gives."""
        return Plan(
            target=target,
            kind="stream" if self.streams else "unary",
            path=_SERVICE + self.name,
            request=self.request.SerializeToString(),
            in_flight=self.in_flight,
            seconds=seconds,
            warm_up=0.0,
            senders=senders,
        )


def cases(length: int) -> list[Case]:
    """What is asked; streams have `length` answers."""
    photo = pb.DetectRequest(object="red circle", max_objects=3)
    photo.image.encoded.data = picture(0, SIZE)
    points = task_pb2.PointTask(object="red circle", max_objects=length)
    points_request = pb.GenerateRequest(task=task_pb2.Task(point=points))
    points_request.image.encoded.data = picture(0, (32, 32))
    words = task_pb2.Task(query=task_pb2.QueryTask(question="What is in the picture?"))
    words.sampling.max_tokens = length
    return [
        Case("Query", "Query", pb.QueryRequest(question="What is in the picture?"), 64),
        Case(f"Detect, {len(photo.image.encoded.data) // 1024} KiB JPEG", "Detect", photo, 16),
        Case(f"Generate, {length} points", "Generate", points_request, 16, "points", length),
        Case(
            f"Generate, {length} words",
            "Generate",
            pb.GenerateRequest(task=words),
            16,
            "words",
            length,
        ),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A running server; `pid` is the process that speaks gRPC, `engine` the one behind it."""

    name: str
    target: str
    pid: int
    engine: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender.

    `per_second` and CPU, in microseconds, are of what the case counts: calls, or answers of
    streams. Our server joins words that it cannot send as fast as they come; points never.
    """

    per_second: float
    p50_ms: float
    cpu_us: float
    engine_cpu_us: float
    sender_cpu_share: float
    messages_per_request: float


@contextlib.contextmanager
def echo_server(answers: Answers, *, tuned: bool = False) -> Iterator[Contender]:
    """A bare server that says `answers`."""
    name, options = ("tuned", ["--tuned"]) if tuned else ("bare", [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        answers.save(path)
        with _process(name, "benchmarks.echo", str(path), *options) as contender:
            yield contender


@contextlib.contextmanager
def inside_server() -> Iterator[Contender]:
    """Our service with the null engine in its own process."""
    with _process("inside", "benchmarks.inside") as contender:
        yield contender


@contextlib.contextmanager
def _process(name: str, module: str, *arguments: str) -> Iterator[Contender]:
    """A program that prints its port."""
    settings = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=settings,  # grpc as it comes: what our service asks of it is its own doing
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None, "it was asked for"
        yield Contender(name, f"127.0.0.1:{int(process.stdout.readline())}", process.pid)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def null_server(options: Sequence[str] = ()) -> Iterator[Contender]:
    """Our server before an engine without a model."""
    with LocalServer((*NULL, *options)) as server:
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        engine = cpu.engine(server.pid)
        yield Contender("legato", server.target, server.pid, engine)


def recorded(target: str, asked: Sequence[Case]) -> Answers:
    """What a server answers to each case."""
    unary: dict[str, bytes] = {}
    streams: dict[str, list[bytes]] = {}
    with grpc.insecure_channel(target) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for case in asked:
            answer = getattr(stub, case.name)(case.request)
            if case.streams:
                request: Any = case.request
                kind = request.task.WhichOneof("kind")
                streams[kind] = _one_each(list(answer))
            else:
                unary[case.name] = answer.SerializeToString()
    return Answers(unary, streams)


def _one_each(events: Sequence[pb.GenerateResponse]) -> list[bytes]:
    """A stream's messages, text of several steps cut into one message a step."""
    messages: list[pb.GenerateResponse] = []
    for event in events:
        words = event.text.text.split(" ") if event.HasField("text") else [""]
        for word in words:
            message = pb.GenerateResponse()
            message.CopyFrom(event)
            if word:
                message.text.text = f" {word}"
            message.index = len(messages)
            messages.append(message)
    return [message.SerializeToString() for message in messages]


def measure(case: Case, contender: Contender, seconds: float, senders: int) -> Sample:
    """One turn."""
    before = _used(contender)
    seen: Record = run(case.plan(contender.target, seconds, senders))
    if seen.errors:
        raise RuntimeError(f"{case.title} on {contender.name}: {dict(seen.errors)}")
    after = _used(contender)
    answers = seen.due * case.answers
    own, engine = (1e6 * (b - a) / answers for a, b in zip(before, after, strict=True))
    messages = (seen.first.count + seen.gap.count) / seen.due + case.streams  # and `started`
    return Sample(
        per_second=seen.messages / messages * case.answers / seconds,
        p50_ms=seen.latency.percentile(50) * 1e3,
        cpu_us=own,
        engine_cpu_us=engine,
        sender_cpu_share=seen.cpu_share,
        messages_per_request=messages,
    )


def _used(contender: Contender) -> tuple[float, float]:
    engine = cpu.seconds(contender.engine) if contender.engine else 0.0
    return cpu.seconds(contender.pid), engine


def compare(
    case: Case, contenders: Sequence[Contender], arguments: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Turns of all contenders, one after another, `arguments.rounds` times after a warm-up."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        measure(case, contender, 1.0, arguments.senders)
    for _ in range(arguments.rounds):
        for contender in contenders:
            sample = measure(case, contender, arguments.seconds, arguments.senders)
            samples[contender.name].append(sample)
            print(f"{case.title}, {contender.name}: {sample.per_second:.0f}/s", file=sys.stderr)
    return samples


def row(case: Case, samples: dict[str, list[Sample]]) -> list[str]:
    """Medians of all turns; shares of the bare server are medians of the paired ratios."""
    bare = samples["bare"]

    def median(name: str, field: str) -> float:
        return float(statistics.median(getattr(turn, field) for turn in samples[name]))

    def share(name: str) -> str:
        pairs = zip(bare, samples[name], strict=True)
        of_turns = (ours.per_second / theirs.per_second for theirs, ours in pairs)
        return f"{statistics.median(of_turns):.0%}"

    return [
        case.title,
        case.counted,
        f"{median('bare', 'per_second'):.0f}",
        f"{median('tuned', 'per_second'):.0f}",
        *(f"{median('inside', 'per_second'):.0f}", share("inside")),
        *(f"{median('legato', 'per_second'):.0f}", share("legato")),
        *(f"{median(name, 'cpu_us'):.1f}" for name in ("bare", "tuned", "inside", "legato")),
        f"{median('legato', 'engine_cpu_us'):.1f}",
        f"{median('legato', 'messages_per_request'):.1f}",
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
            asks = serve_ghz.NAME in answers.unary
            ghz = serve_ghz.measure({each.name: each.target for each in contenders if asks})
    scaled = serve_processes.measure(
        echo_server(answers),
        null_server,
        asked,
        arguments.processes,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
    )
    idle = serve_sessions.measure(null_server, arguments.sessions)
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
        *serve_processes.text(scaled),
        "",
        *serve_ghz.text(ghz),
        "",
        *serve_sessions.text(idle),
    ]
    title = "The service around the null engine, and a bare grpc.aio server"
    record.write(arguments.name, title, figures, tables)
    return 0
