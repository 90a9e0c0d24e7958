"""One timer for the deadlines of all requests."""

import math
import time

import pytest
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import DeadlineExceeded
from legato_engine.types import QueryTask, Request, RequestKey
from legato_service.requests.registry import Deadlines


def watched(order):
    """Return a watched stream that records its end."""
    request = Request(request_id=RequestKey("a"), task=QueryTask(question="?"))
    return RequestStream(request, on_abort=order.append, on_stop=order.append)


async def exceeded(stream):
    """Wait for the stream to end by its deadline."""
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


async def test_each_deadline_is_met_in_its_turn():
    """Earlier deadlines expire first, in whatever order they were set; others are left alone."""
    order: list[RequestStream] = []
    deadlines, now = Deadlines(), time.monotonic()
    late, early, forgotten, endless = (watched(order) for _ in range(4))
    for stream, deadline in (
        (late, now + 0.2),
        (forgotten, now + 0.01),
        (endless, math.inf),
        (early, now + 0.05),
    ):
        deadlines.watch(stream, deadline)
    deadlines.forget(forgotten)
    await exceeded(late)
    assert order == [early, late]
    assert time.monotonic() >= now + 0.2


async def test_a_deadline_is_watched_after_all_others_have_passed():
    """A timer without deadlines left is set again for a new one."""
    order: list[RequestStream] = []
    deadlines = Deadlines()
    for _ in range(2):
        stream = watched(order)
        deadlines.watch(stream, time.monotonic())
        await exceeded(stream)
    assert len(order) == 2


async def test_forgetting_twice_is_harmless():
    """A stream may be forgotten after its deadline, or without having been watched."""
    deadlines = Deadlines()
    stream = watched([])
    deadlines.watch(stream, time.monotonic())
    await exceeded(stream)
    deadlines.forget(stream)
    deadlines.forget(watched([]))
