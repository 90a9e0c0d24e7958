"""Logs of the engine process."""

from __future__ import annotations

import logging
import time

import msgspec
import structlog

from legato_engine.log_sink import NEW_LINE, LogSink, SinkHandler, standard_error


def configure_logging(level: str = "info", *, for_people: bool = False) -> None:
    """Log JSON lines, or lines for people, the standard library's included."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if for_people:
        # The usual tracebacks show local variables, and with them prompts.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(exception_formatter=plain), _on_new_line]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    sink = LogSink(standard_error(), _dropped_text if for_people else _dropped)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *last, _bytes],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: sink,
    )
    handler = SinkHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.INFO), force=True)


def _on_new_line(_logger: object, _method: str, line: object) -> str:
    return NEW_LINE.decode() + str(line)


def _bytes(_logger: object, _method: str, line: object) -> bytes:
    return str(line).encode(errors="replace")


def _dropped(count: int) -> bytes:
    line = {
        "count": count,
        "event": "log_lines_dropped",
        "level": "warning",
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return msgspec.json.encode(line)


def _dropped_text(count: int) -> bytes:
    return f"log_lines_dropped count={count}".encode()
