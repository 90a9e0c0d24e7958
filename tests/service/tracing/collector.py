"""An OpenTelemetry collector for spans, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.metadata: list[dict[str, str]] = []

    async def Export(self, request, context):
        """Take spans."""
        self.metadata.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def one(self, name: str) -> Any:
        """The only span of this name."""
        (span,) = self.named(name)
        return span

    def named(self, name: str) -> list[Any]:
        """All spans of this name."""
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Any) -> dict[str, Any]:
        """The spans with this parent, by name."""
        return {s.name: s for s in self.spans if s.parent_span_id == parent.span_id}


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    found: dict[str, Any] = {}
    for each in attributes:
        value = each.value
        kind = value.WhichOneof("value")
        found[each.key] = (
            [item.string_value for item in value.array_value.values]
            if kind == "array_value"
            else getattr(value, kind)
        )
    return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Listen for the length of the block."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    collector.address = f"http://127.0.0.1:{port}"
    try:
        yield collector
    finally:
        await server.stop(None)
