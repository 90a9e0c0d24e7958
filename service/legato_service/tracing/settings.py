"""Tracing as configured; OpenTelemetry is imported only when it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from legato_service.config import ServiceConfig

if TYPE_CHECKING:
    from legato_service.tracing.tracer import Tracer


def tracer(config: ServiceConfig, model: Callable[[], str]) -> Tracer | None:
    """Return None when tracing is off; `model` returns the name of the served model."""
    if not config.otlp_endpoint:
        return None
    from legato_service.tracing.tracer import Tracer, span_exporter

    return Tracer(span_exporter(config.otlp_endpoint), config.trace_ratio, model)
