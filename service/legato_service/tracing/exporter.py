"""Sends spans to a collector."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_INSECURE = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")


def span_exporter(endpoint: str) -> SpanProcessor:
    """Send spans in batches from a thread of its own.

    A URL of the scheme http is without TLS, one of https with it; without a scheme the standard
    variables decide. Headers, certificates, timeout and batches come from `OTEL_*` variables.
    """
    insecure = None
    if not any(name in os.environ for name in _INSECURE):
        insecure = not endpoint.startswith("https://")
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure))
