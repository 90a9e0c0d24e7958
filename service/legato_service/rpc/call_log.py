"""The log lines of calls: one for each, made when several are due."""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

import structlog

from legato_service.logs import configuration
from legato_service.rpc.call import Call

PAUSE = 0.01  # seconds that the end of a call may wait for others
QUIET = ("/grpc.health.", "/grpc.reflection.")  # logged at debug level

log = structlog.get_logger("legato.rpc")


_Ended: TypeAlias = tuple[Call, str, str, float, int]
"""A call, the name of the status that it ended with, why, the seconds it took, and when it ended,
of `time.time_ns()`."""


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
        self._ended.append((call, code, reason, seconds, time.time_ns()))
        if self._closed:
            self.flush()

    def flush(self) -> None:
        """Tell of all that have ended."""
        ended, self._ended = self._ended, []
        configuration.write(log.bind(), [_line(*each) for each in ended])

    def close(self) -> None:
        """Tell of all, and from now on at once: the loop is about to end."""
        self._closed = True
        self.flush()


class _Line(configuration.LogRecord, omit_defaults=True):
    """Names, times in milliseconds, and counts; never a prompt, a picture or an answer.

    To round these times, by a call and to a number of digits, would be most of what a line costs.
    """

    request_id: str
    method: str
    code: str
    total_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    reason: str = ""
    tenant: str = ""
    priority: int = 0
    client: str = ""
    trace_id: str = ""
    previous_attempts: int = 0
    reply: str = ""


def _line(call: Call, code: str, reason: str, seconds: float, ended_ns: int) -> _Line:
    queue = prefill = decode = None
    if (timings := call.timings) is not None:
        queue = (timings.queue * 1e6 + 0.5).__trunc__() / 1e3
        prefill = (timings.prefill * 1e6 + 0.5).__trunc__() / 1e3
        decode = (timings.decode * 1e6 + 0.5).__trunc__() / 1e3
    usage = call.usage
    return _Line(
        "rpc",
        "debug" if call.method.startswith(QUIET) else "info",
        configuration.timestamp(ended_ns),
        call.request_id,
        call.method,
        code,
        (seconds * 1e6 + 0.5).__trunc__() / 1e3,
        queue,
        prefill,
        decode,
        None if usage is None else usage.input_tokens,
        None if usage is None else usage.output_tokens,
        reason,
        call.tenant,
        call.priority,
        call.client,
        call.trace_id,
        call.previous_attempts,
        call.reply,
    )
