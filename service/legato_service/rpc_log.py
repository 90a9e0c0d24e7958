"""The log lines of calls: one for each, made when several are due."""

from __future__ import annotations

import asyncio
import operator
import time

import structlog

from legato_service.call import Call
from legato_service.logs import timestamp

PAUSE = 0.01  # seconds that the end of a call may wait for others
QUIET = ("/grpc.health.", "/grpc.reflection.")  # logged at debug level

_WHEN_SAID = ("reason", "tenant", "priority", "client", "trace_id", "previous_attempts", "reply")
_when_said = operator.attrgetter(*_WHEN_SAID)
_UNSAID = _when_said(Call)

log = structlog.get_logger("legato.rpc")


class RpcLog:
    """Tells the log how calls ended, in order, a moment later. Belongs to a running event loop.

    The line of a call costs several times as much while answers leave as it does among others: by
    then all that makes it has left the processor's caches.
    """

    def __init__(self) -> None:
        self._ended: list[Call] = []
        self._closed = False

    def tell(self, call: Call, code: str, reason: str = "") -> None:
        """The call has ended now."""
        if not self._ended and not self._closed:
            asyncio.get_running_loop().call_later(PAUSE, self.flush)
        call.received = b""  # megabytes, perhaps
        call.code = code
        if reason:
            call.reason = reason
        call.seconds = time.monotonic() - call.started
        call.ended_ns = time.time_ns()
        self._ended.append(call)
        if self._closed:
            self.flush()

    def flush(self) -> None:
        """Tell of all that have ended."""
        ended, self._ended = self._ended, []
        logger = log.bind()  # once, which is dear
        for call in ended:
            write = logger.debug if call.method.startswith(QUIET) else logger.info
            write("rpc", **_fields(call))

    def close(self) -> None:
        """Tell of all, and from now on at once: the loop is about to end."""
        self._closed = True
        self.flush()


def _fields(call: Call) -> dict[str, object]:
    """Names, times and counts; never a prompt, a picture or an answer."""
    fields: dict[str, object] = {
        "request_id": call.request_id,
        "method": call.method,
        "code": call.code,
    }
    if (said := _when_said(call)) != _UNSAID:
        fields |= {name: value for name, value in zip(_WHEN_SAID, said, strict=True) if value}
    # Milliseconds; rounding to digits costs several times as much as this.
    fields["total_ms"] = round(call.seconds * 1e6) / 1e3
    timings, usage = call.timings, call.usage
    if timings is not None:
        fields["queue_ms"] = round(timings.queue * 1e6) / 1e3
        fields["prefill_ms"] = round(timings.prefill * 1e6) / 1e3
        fields["decode_ms"] = round(timings.decode * 1e6) / 1e3
    if usage is not None:
        fields["input_tokens"] = usage.input_tokens
        fields["output_tokens"] = usage.output_tokens
    fields["timestamp"] = timestamp(call.ended_ns)
    return fields
