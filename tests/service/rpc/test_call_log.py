"""The log lines of calls, made a moment after their end."""

import time

import structlog
from legato_service.logs.configuration import timestamp
from legato_service.rpc.call import Call
from legato_service.rpc.call_log import CallLog

QUERY = "/legato.v1.InferenceService/Query"


async def test_lines_keep_their_order_and_their_time():
    """A line that was made later says when its call ended, and stands where it ended."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        bounds = [time.time_ns()]
        for number in range(3):
            call_log.record(Call(QUERY, request_id=str(number)), "OK")
            bounds.append(time.time_ns())
        assert not logs
        call_log.flush()
    assert [line["request_id"] for line in logs] == ["0", "1", "2"]
    for line, begin, end in zip(logs, bounds, bounds[1:], strict=False):
        assert timestamp(begin) <= line["timestamp"] <= timestamp(end)


async def test_a_line_is_told_once():
    """What was told is not told again by the next telling."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            call_log.record(Call(QUERY, request_id=name), "OK")
            call_log.flush()
    assert [line["request_id"] for line in logs] == ["a", "b"]


async def test_nothing_waits_for_a_loop_that_ends():
    """Closing tells what waits, and what ends after that is told at once."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call(QUERY, request_id="before"), "OK")
        call_log.close()
        call_log.record(Call(QUERY, request_id="after"), "CANCELLED")
        assert [line["request_id"] for line in logs] == ["before", "after"]


async def test_a_call_that_ended_holds_no_picture():
    """The bytes of a request go with its call's end, and do not wait for its line."""
    call = Call(QUERY)
    call.received = b"picture"
    CallLog().record(call, "OK")
    assert call.received == b""


async def test_health_checks_are_told_to_who_debugs():
    """Calls of every second are below what is logged by default; the others are not."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call("/grpc.health.v1.Health/Check"), "OK")
        call_log.record(Call(QUERY), "OK")
        call_log.flush()
    assert [line["log_level"] for line in logs] == ["debug", "info"]
