"""The log lines of calls: one for each, made when several are due."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import structlog

from legato_service.call import Call
from legato_service.logs import timestamp

PAUSE = 0.01  # seconds that the end of a call may wait for others
QUIET = ("/grpc.health.", "/grpc.reflection.")  # logged at debug level

_WHEN_SAID = ("tenant", "priority", "client", "trace_id", "previous_attempts", "reply")

log = structlog.get_logger("legato.rpc")


class _Ended(NamedTuple):
    call: Call
    code: str
    reason: str
    seconds: float  # that the call took
    wall_ns: int  # when it ended


class RpcLog:
    """Tells the log how calls ended, in order, a moment later. Belongs to a running event loop.

    The line of a call costs several times as much while answers leave as it does among others: by
    then all that makes it has left the processor's caches.
    """

    def __init__(self) -> None:
        self._ended: list[_Ended] = []
        self._closed = False

    def tell(self, call: Call, code: str, reason: str = "") -> None:
        """The call has ended now."""
        if not self._ended and not self._closed:
            asyncio.get_running_loop().call_later(PAUSE, self.flush)
        call.received = b""  # megabytes, perhaps
        seconds = time.monotonic() - call.started
        self._ended.append(_Ended(call, code, reason, seconds, time.time_ns()))
        if self._closed:
            self.flush()

    def flush(self) -> None:
        """Tell of all that have ended."""
        ended, self._ended = self._ended, []
        for each in ended:
            write = log.debug if each.call.method.startswith(QUIET) else log.info
            write("rpc", **_fields(each))

    def close(self) -> None:
        """Tell of all, and from now on at once: the loop is about to end."""
        self._closed = True
        self.flush()


def _fields(ended: _Ended) -> dict[str, object]:
    """Names, times and counts; never a prompt, a picture or an answer."""
    call = ended.call
    fields: dict[str, object] = {
        "request_id": call.request_id,
        "method": call.method,
        "code": ended.code,
    }
    if ended.reason:
        fields["reason"] = ended.reason
    for name in _WHEN_SAID:
        if value := getattr(call, name):
            fields[name] = value
    fields["total_ms"] = _ms(ended.seconds)
    if call.timings is not None:
        fields["queue_ms"] = _ms(call.timings.queue)
        fields["prefill_ms"] = _ms(call.timings.prefill)
        fields["decode_ms"] = _ms(call.timings.decode)
    if call.usage is not None:
        fields["input_tokens"] = call.usage.input_tokens
        fields["output_tokens"] = call.usage.output_tokens
    fields["timestamp"] = timestamp(ended.wall_ns)
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e6) / 1e3  # rounding to digits costs several times as much
