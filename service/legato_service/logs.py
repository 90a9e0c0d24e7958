"""Logs on standard error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog
from legato_engine.log_sink import NEW_LINE, LogSink, SinkHandler, standard_error

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor


def configure(level: str, *, terminal: bool) -> None:
    """Configure structlog, and route the standard library's loggers through it. Call once."""
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        _stamped,
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    # The usual tracebacks show local variables, and with them prompts and credentials.
    plain = structlog.dev.plain_traceback
    last: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=plain), _bytes]
    report: Callable[[int], bytes] = _dropped_text
    wrapper: type[Any] = structlog.make_filtering_bound_logger(number)
    if not terminal:
        last = [structlog.processors.format_exc_info, _json]
        report = _dropped_json
        wrapper = type("Logger", (JsonLogger,), {"threshold": number})
    sink = LogSink(standard_error(), report)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=wrapper,
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=True,
    )
    handler = SinkHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last, _text],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


_SECOND = 1_000_000_000  # nanoseconds


class _Clock:
    """RFC 3339 in UTC; caches the text of the current second."""

    def __init__(self) -> None:
        self._began = 0  # nanoseconds; start of the cached second
        self._text = ""

    def text(self, wall_ns: int) -> str:
        since = wall_ns - self._began
        if not 0 <= since < _SECOND:
            second, since = divmod(wall_ns, _SECOND)
            self._began = second * _SECOND
            self._text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._text}.{since // 1000:06d}Z"


timestamp = _Clock().text
"""Format a `time.time_ns()` as log records have it."""


def _stamped(_logger: object, _method: str, event: EventDict) -> EventDict:
    if "timestamp" not in event:
        event["timestamp"] = timestamp(time.time_ns())
    return event


class LogRecord(msgspec.Struct, omit_defaults=True):
    """A complete log record; subclasses add fields."""

    event: str
    level: Literal["debug", "info"]
    timestamp: str


class JsonLogger(structlog.BoundLoggerBase):
    """Logger that encodes a record in one step; structlog processors cost several times as much."""

    threshold = logging.INFO
    _logger: LogSink

    def debug(self, event: str, **fields: object) -> None:
        if self.threshold <= logging.DEBUG:
            self._logger.later(self._line("debug", event, fields))

    def info(self, event: str, **fields: object) -> None:
        if self.threshold <= logging.INFO:
            self._logger.later(self._line("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        if self.threshold <= logging.WARNING:
            self._logger.now(self._line("warning", event, fields))

    def error(self, event: str, **fields: object) -> None:
        if self.threshold <= logging.ERROR:
            self._logger.now(self._line("error", event, fields))

    def exception(self, event: str, **fields: object) -> None:
        self.error(event, **{"exc_info": True, **fields})

    def write(self, records: Sequence[LogRecord]) -> None:
        shown = [
            each for each in records if each.level == "info" or self.threshold <= logging.DEBUG
        ]
        if shown and self.threshold <= logging.INFO:
            # A list: CPython makes a tuple of an iterator at a guessed size, cuts it, and keeps the
            # pieces, up to 2,000 of each size.
            self._logger.later(*[_encode(each) for each in shown])

    def _line(self, level: str, event: str, fields: dict[str, object]) -> bytes:
        line = {**self._context, **fields} if self._context else fields
        line["event"] = event
        line["level"] = level
        _stamped(None, level, line)
        if "exc_info" in line:
            structlog.processors.format_exc_info(None, level, line)
        return _encode(line)


def write(logger: Any, records: Sequence[LogRecord]) -> None:
    """Write records in one batch, which costs JSON loggers a fraction of separate calls."""
    if isinstance(logger, JsonLogger):
        logger.write(records)
        return
    for record in records:
        fields = msgspec.to_builtins(record)
        getattr(logger, fields.pop("level"))(fields.pop("event"), **fields)


_encode = msgspec.json.Encoder(enc_hook=repr).encode


def _json(_logger: object, _method: str, event: EventDict) -> bytes:
    return _encode(event)


def _bytes(_logger: object, _method: str, line: Any) -> bytes:
    return NEW_LINE + str(line).encode(errors="replace")


def _dropped_json(count: int) -> bytes:
    line = {"count": count, "event": "log_lines_dropped", "level": "warning"}
    return _encode(_stamped(None, "warning", line))


def _dropped_text(count: int) -> bytes:
    return f"log_lines_dropped count={count}".encode()


def _text(_logger: object, _method: str, line: Any) -> str:
    return line.decode() if isinstance(line, bytes) else line
