"""The cost of idle sessions: memory of each, and the latency of other calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import grpc
from legato.v1 import inference_pb2, session_pb2, task_pb2
from legato_client._errors import from_rpc_error
from legato_client.load.plan import LoadPlan
from legato_client.load.run import run

from benchmarks import record
from benchmarks.serve import load
from benchmarks.serve.contenders import Contender

RATE, SECONDS, WARM_UP = 200.0, 8.0, 2.0
_PER_CONNECTION = 250
_QUERY = "/legato.v1.InferenceService/Query"
_SESSION = "/legato.v1.SessionService/Session"
_SETTLE = 2.0  # seconds from the last opened session to the first measurement


def measure(
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


def text(found: Sequence[dict[str, float]]) -> list[str]:
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


# ---------------------------------------------------------------- the sessions


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
