"""Runs a plan in sender processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import time
from multiprocessing.connection import Connection

import grpc

from legato_client._grpc.channel import MAX_MESSAGE_BYTES, ChannelOptions
from legato_client.load.plan import LoadPlan, due_times
from legato_client.load.report import LoadResults, Meter, RequestMeasurement
from legato_client.load.targets import CallFailed, LoadTarget, make_target, reason_of

_READY = 60.0  # seconds a sender may take to start
_PATIENCE = 30.0  # beyond the plan's own end and its last deadline
_HEAD_START = 0.5  # seconds from the last sender's start to the first request


class LoadFailed(Exception):
    """A sender could not send."""


def run(plan: LoadPlan) -> LoadResults:
    """Run the plan. Raises `LoadFailed` if a sender ends without a record."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for share in range(plan.senders):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there, plan, share), daemon=True)
            process.start()
            there.close()  # only the process holds it, so its death can be read
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe, _READY)
        start = time.monotonic() + _HEAD_START
        for pipe in pipes:
            pipe.send(start)
        total = LoadResults()
        for pipe in pipes:
            total.merge(_receive(pipe, plan.seconds + plan.timeout + _PATIENCE))
        return total
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection, seconds: float) -> LoadResults:
    """Receive a sender's record; it sends an empty one when it is ready, then its own."""
    try:
        if not pipe.poll(seconds):
            raise LoadFailed(f"a sender said nothing for {seconds:g} s")
        said = pipe.recv()
    except EOFError:
        raise LoadFailed("a sender died") from None
    if isinstance(said, str):
        raise LoadFailed(said)
    assert isinstance(said, LoadResults)
    return said


def _serve(pipe: Connection, plan: LoadPlan, share: int) -> None:
    pipe.send(LoadResults())
    try:
        pipe.send(send(plan, share, pipe.recv()))
    except (grpc.RpcError, CallFailed) as error:
        pipe.send(f"the sessions could not be opened: {reason_of(error)}")


# ---------------------------------------------------------------- sender

MAX_PENDING = 20_000  # per sender; further requests count as NOT_SENT
_CHANNEL: ChannelOptions = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
)


def send(plan: LoadPlan, share: int, start: float) -> LoadResults:
    """Send share number `share` of a plan that begins at `start` of `time.monotonic()`.

    Raises `grpc.RpcError` or `CallFailed` when a session cannot be opened.
    """
    # Only this selector's timeouts are finer than a millisecond.
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        return runner.run(_send(plan, share, start))


async def _send(plan: LoadPlan, share: int, start: float) -> LoadResults:
    meter = Meter(start + plan.warm_up, start + plan.seconds)
    options = _CHANNEL + plan.security.channel_options
    async with plan.security.open_channel(grpc.aio, plan.target, options) as channel:
        target = make_target(channel, plan, share)
        await target.open()
        try:
            await asyncio.sleep(start - time.monotonic())
            cpu = time.process_time()
            if plan.rate:
                await _open_loop(plan, share, start, target, meter)
            else:
                await _closed_loop(plan, share, start, target, meter)
            elapsed = time.monotonic() - start
            meter.record.cpu_share = (time.process_time() - cpu) / elapsed
        finally:
            await target.close()
    return meter.record


async def _open_loop(
    plan: LoadPlan, share: int, start: float, target: LoadTarget, meter: Meter
) -> None:
    """Measure from when each request is due, not from when it was sent."""
    pending: set[asyncio.Task[None]] = set()
    offsets = due_times(
        plan.arrivals, plan.rate, plan.seconds, share=share, shares=plan.senders, seed=plan.seed
    )
    for offset in offsets:
        due = start + offset
        early = due - time.monotonic()
        if early > 0:
            await asyncio.sleep(early)
        watch = meter.expect(due)
        if len(pending) >= MAX_PENDING:
            watch.fail("NOT_SENT")
            continue
        task = asyncio.create_task(_send_one(target, watch))
        pending.add(task)
        task.add_done_callback(pending.discard)
    if pending:
        await asyncio.wait(pending)


async def _closed_loop(
    plan: LoadPlan, share: int, start: float, target: LoadTarget, meter: Meter
) -> None:
    end = start + plan.seconds

    async def caller_loop() -> None:
        while (now := time.monotonic()) < end:
            await _send_one(target, meter.expect(now))

    loops = len(range(share, plan.in_flight, plan.senders))
    await asyncio.gather(*(caller_loop() for _ in range(loops)))


async def _send_one(target: LoadTarget, watch: RequestMeasurement) -> None:
    try:
        await target.send(watch)
    except (grpc.RpcError, CallFailed) as error:
        watch.fail(reason_of(error))
    else:
        watch.end()
