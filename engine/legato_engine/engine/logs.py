"""Logs of the engine process."""

from __future__ import annotations

import logging
import time

import msgspec
import structlog

from legato_engine.log_sink import LogSink, SinkHandler, standard_error


def configure_logging() -> None:
    """Log JSON lines, the standard library's included."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    sink = LogSink(standard_error(), _dropped)
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(), _bytes],
        logger_factory=lambda *_: sink,
    )
    handler = SinkHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


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
