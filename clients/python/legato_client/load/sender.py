"""A sender process."""

from __future__ import annotations

import asyncio
import selectors
import time

import grpc

from legato_client._grpc.channel import MAX_MESSAGE_BYTES, ChannelOptions
from legato_client.load.plan import LoadPlan, due_times
from legato_client.load.report import LoadResults, Meter, RequestMeasurement
from legato_client.load.targets import CallFailed, LoadTarget, make_target, reason_of

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
    async with _channel(plan) as channel:
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


def _channel(plan: LoadPlan) -> grpc.aio.Channel:
    credentials = plan.security.credentials
    options = _CHANNEL + plan.security.channel_options
    if credentials is None:
        return grpc.aio.insecure_channel(plan.target, options=options)
    return grpc.aio.secure_channel(plan.target, credentials, options=options)


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
