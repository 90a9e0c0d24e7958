"""The servers that `serve` compares, and the CPU that their processes use."""

from __future__ import annotations

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
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc
from legato_client.cli.demo import LocalServer
from legato_client.load.report import LoadResults
from legato_client.load.run import run

from benchmarks.serve import load
from benchmarks.serve.echo import Answers
from benchmarks.serve.load import Case

# ---------------------------------------------------------------- turns

# Turns of `serve`: samples of one contender, and their comparison.


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender.

    `per_second` and CPU, in microseconds, are of what the case counts: calls, or answers of
    streams. Our server merges words that it cannot send in time, and never points.
    """

    per_second: float
    p50_ms: float
    cpu_us: float
    engine_cpu_us: float
    sender_cpu_share: float
    messages_per_request: float

    @property
    def engine_share(self) -> float:
        """Share of a core that the engine used."""
        return self.engine_cpu_us * self.per_second / 1e6


def take_turn(case: Case, contender: Contender, seconds: float, senders: int) -> Sample:
    """Load one contender for `seconds`.

    Raises:
        RuntimeError: A request failed.
    """
    before = contender.used()
    seen: LoadResults = run(case.plan(contender.target, seconds, senders))
    if seen.errors:
        raise RuntimeError(f"{case.title} on {contender.name}: {dict(seen.errors)}")
    after = contender.used()
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


def median(turns: Sequence[Sample], field: str) -> float:
    """Return the median of one figure."""
    return float(statistics.median(getattr(turn, field) for turn in turns))


def share_of(theirs: Sequence[Sample], ours: Sequence[Sample]) -> float:
    """Return the median ratio of ours to theirs, by turns; both of a pair met the same load."""
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(own.per_second / other.per_second for other, own in pairs)


# ---------------------------------------------------------------- contenders

_NULL = ("--model", "null", "--null-objects", "100000", "--max-sessions", "10000")
_START_TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A running server; `pid` is the process that speaks gRPC, `engine` its engine process."""

    name: str
    target: str
    pid: int
    engine: int | None = None

    def used(self) -> tuple[float, float]:
        """Return the CPU seconds of all service processes, and of the engine."""
        service = {self.pid, *load.children(self.pid)} - {self.engine}
        engine = load.seconds(self.engine) if self.engine else 0.0
        return sum(map(load.seconds, service)), engine


@contextlib.contextmanager
def echo_server(answers: Answers, *, tuned: bool = False) -> Iterator[Contender]:
    """Start a bare server that answers with `answers`."""
    name, options = ("tuned", ["--tuned"]) if tuned else ("bare", [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        answers.save(path)
        with _process(name, "benchmarks.serve.echo", str(path), *options) as contender:
            yield contender


@contextlib.contextmanager
def inside_server() -> Iterator[Contender]:
    """Start our service with the null engine in its own process."""
    with _process("inside", "benchmarks.serve.inside") as contender:
        yield contender


@contextlib.contextmanager
def _process(name: str, module: str, *arguments: str) -> Iterator[Contender]:
    """Start a program that prints its port."""
    settings = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=settings,  # gRPC's defaults; our service sets its own
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
    """Start our service with an engine process without a model."""
    with LocalServer((*_NULL, *options)) as server:
        server.wait_until_serving(_START_TIMEOUT, lambda _: None)
        engine = load.engine(server.pid)
        yield Contender("legato", server.target, server.pid, engine)


def recorded(target: str, asked: Sequence[Case]) -> Answers:
    """Record a server's answer to each case."""
    unary: dict[str, bytes] = {}
    streams: dict[str, list[bytes]] = {}
    with grpc.insecure_channel(target) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for case in asked:
            answer = getattr(stub, case.name)(case.request)
            if case.streams:
                request: Any = case.request
                kind = request.task.WhichOneof("kind")
                streams[kind] = one_each(list(answer))
            else:
                unary[case.name] = answer.SerializeToString()
    return Answers(unary, streams)


def one_each(events: Sequence[pb.GenerateResponse]) -> list[bytes]:
    """Cut text of several steps into one message for each step."""
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
