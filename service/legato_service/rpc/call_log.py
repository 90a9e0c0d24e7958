"""The log records of RPCs, written in batches."""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

import structlog

from legato_service.logs import configuration
from legato_service.rpc.call import Call

FLUSH_DELAY = 0.01  # seconds
DEBUG_METHODS = ("/grpc.health.", "/grpc.reflection.")

log = structlog.get_logger("legato.rpc")


_Ended: TypeAlias = tuple[Call, str, str, float, int]
"""A call, the name of its status, the reason, its seconds, and its end in `time.time_ns()`."""


class CallLog:
    """Logs how RPCs ended, in order, a moment later. Needs a running event loop.

    A record costs several times as much between responses as in a batch, with warm caches.
    """

    def __init__(self) -> None:
        self._ended: list[_Ended] = []
        self._closed = False

    def record(self, call: Call, code: str, reason: str = "") -> None:
        if not self._ended and not self._closed:
            asyncio.get_running_loop().call_later(FLUSH_DELAY, self.flush)
        call.received = b""  # perhaps megabytes
        seconds = time.monotonic() - call.started
        self._ended.append((call, code, reason, seconds, time.time_ns()))
        if self._closed:
            self.flush()

    def flush(self) -> None:
        ended, self._ended = self._ended, []
        configuration.write(log.bind(), [_log_record(*each) for each in ended])

    def close(self) -> None:
        """Write all records now, and later ones at once."""
        self._closed = True
        self.flush()


class _CallRecord(configuration.LogRecord, omit_defaults=True):
    """Names, times in milliseconds, and counts; never a prompt, an image or an answer."""

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
    credential: str = ""  # its id
    priority: int = 0
    client: str = ""
    trace_id: str = ""
    previous_attempts: int = 0
    reply: str = ""
    resumptions: int = 0


def _log_record(call: Call, code: str, reason: str, seconds: float, ended_ns: int) -> _CallRecord:
    queue = prefill = decode = None
    if (timings := call.timings) is not None:
        queue = _milliseconds(timings.queue)
        prefill = _milliseconds(timings.prefill)
        decode = _milliseconds(timings.decode)
    usage = call.usage
    return _CallRecord(
        "rpc_ended",
        "debug" if call.method.startswith(DEBUG_METHODS) else "info",
        configuration.timestamp(ended_ns),
        call.request_id,
        call.method,
        code,
        _milliseconds(seconds),
        queue,
        prefill,
        decode,
        None if usage is None else usage.input_tokens,
        None if usage is None else usage.output_tokens,
        reason,
        call.tenant,
        "" if call.principal is None else call.principal.credential,
        call.priority,
        call.client,
        call.trace_id,
        call.previous_attempts,
        call.reply,
        call.resumptions,
    )


def _milliseconds(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3
