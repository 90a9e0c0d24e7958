"""The log records of RPCs, written in batches."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog
from legato_engine.ipc.messages import Done

from legato_service import logs
from legato_service.rpc.call import Call

FLUSH_DELAY = 0.01  # seconds
DEBUG_METHODS = ("/grpc.health.", "/grpc.reflection.")

log = structlog.get_logger("legato.rpc")


EndedCall: TypeAlias = tuple[Call, str, str, float, int]
"""A call, the name of its status, the reason, its seconds, and its end in `time.time_ns()`."""


EndedRequest: TypeAlias = tuple[Call, Done, int]
"""A request of a call, as the engine finished it, and its end in `time.time_ns()`."""

CallObserver: TypeAlias = Callable[[Sequence[EndedCall], Sequence[EndedRequest]], None]
"""Takes ended calls and requests in batches, before their log records are written.

A call comes after its requests, perhaps in the same batch.
"""


class CallLog:
    """Log of ended RPCs, in order, with a short delay. Needs a running event loop.

    A record costs several times as much between responses as in a batch, with warm caches.
    `starts` counts the calls that began by method; it is None without observers.
    """

    def __init__(self, observers: Sequence[CallObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._ended: list[EndedCall] = []
        self._requests: list[EndedRequest] = []
        self._flush_due = False
        self._closed = False
        self.starts = collections.Counter[str]() if observers else None
        self.on_done = self.request_done if observers else None

    def record(self, call: Call, code: str, reason: str = "") -> None:
        self._schedule_flush()
        call.received = b""  # perhaps megabytes
        seconds = time.monotonic() - call.started
        self._ended.append((call, code, reason, seconds, time.time_ns()))
        if self._closed:
            self.flush()

    def request_done(self, call: Call, done: Done) -> None:
        self._schedule_flush()
        self._requests.append((call, done, time.time_ns()))

    def _schedule_flush(self) -> None:
        if not (self._flush_due or self._closed):
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_DELAY, self.flush)

    def flush(self) -> None:
        self._flush_due = False
        ended, self._ended = self._ended, []
        if self._observers:
            requests, self._requests = self._requests, []
            for observer in self._observers:
                observer(ended, requests)
        logs.write(log.bind(), [_log_record(*each) for each in ended])

    def close(self) -> None:
        """Write all records now, and later ones at once."""
        self._closed = True
        self.flush()


class _CallRecord(logs.LogRecord, omit_defaults=True):
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
    span_id: str = ""
    previous_attempts: int = 0
    reply: str = ""
    resumptions: int = 0


def _log_record(call: Call, code: str, reason: str, seconds: float, ended_ns: int) -> _CallRecord:
    timings, usage = call.timings, call.usage
    return _CallRecord(
        "rpc_ended",
        "debug" if call.method.startswith(DEBUG_METHODS) else "info",
        logs.timestamp(ended_ns),
        call.request_id,
        call.method,
        code,
        _milliseconds(seconds),
        None if timings is None else _milliseconds(timings.queue),
        None if timings is None else _milliseconds(timings.prefill),
        None if timings is None else _milliseconds(timings.decode),
        None if usage is None else usage.input_tokens,
        None if usage is None else usage.output_tokens,
        reason,
        call.tenant,
        "" if call.principal is None else call.principal.credential,
        call.priority,
        call.client,
        call.trace_id,
        call.span_id,
        call.previous_attempts,
        call.reply,
        call.resumptions,
    )


def _milliseconds(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3
