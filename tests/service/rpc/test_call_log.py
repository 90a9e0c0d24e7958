"""Log records of calls, written in batches."""

import random
import sys
import time

import structlog
from legato_service import logs as configuration
from legato_service.logs import timestamp
from legato_service.rpc.call import Call
from legato_service.rpc.call_log import CallLog

QUERY = "/legato.v1.InferenceService/Query"


async def test_records_keep_their_order_and_time():
    """A record has the time and the place of its call's end, however late it is written."""
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


async def test_a_record_is_written_once():
    """A second flush does not repeat records."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            call_log.record(Call(QUERY, request_id=name), "OK")
            call_log.flush()
    assert [line["request_id"] for line in logs] == ["a", "b"]


async def test_nothing_waits_after_closing():
    """Closing writes waiting records; later ones are written at once."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call(QUERY, request_id="before"), "OK")
        call_log.close()
        call_log.record(Call(QUERY, request_id="after"), "CANCELLED")
        assert [line["request_id"] for line in logs] == ["before", "after"]


async def test_an_ended_call_holds_no_image():
    """The bytes of a request are freed at its end, and do not wait for the record."""
    call = Call(QUERY)
    call.received = b"picture"
    CallLog().record(call, "OK")
    assert call.received == b""


async def test_health_checks_are_at_debug_level():
    """Calls of every second are at debug level; the others are not."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call("/grpc.health.v1.Health/Check"), "OK")
        call_log.record(Call(QUERY), "OK")
        call_log.flush()
    assert [line["log_level"] for line in logs] == ["debug", "info"]


class Nowhere:
    """Takes lines and keeps none."""

    def later(self, *lines):
        """Forget them."""


def test_batches_of_any_size_leave_no_memory():
    """CPython keeps thousands of tuples of each size that were made longer and then cut."""
    logger = configuration.JsonLogger(Nowhere(), [], {})
    record = configuration.LogRecord("rpc_ended", "info", "now")
    chance = random.Random(1)

    def growth():
        before = sys.getallocatedblocks()
        for _ in range(2000):
            configuration.write(logger, [record] * chance.randint(1, 9))
        return sys.getallocatedblocks() - before

    growth()
    assert min(growth() for _ in range(3)) < 200  # other threads of the process may allocate, too
