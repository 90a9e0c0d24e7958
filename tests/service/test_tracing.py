"""Spans of real calls, as an OpenTelemetry collector receives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from legato.v1 import inference_pb2, task_pb2
from legato_engine.errors import InternalError
from legato_engine.ipc.messages import Done
from legato_engine.types import FinishReason, QueryOutput
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.service.fakes import TIMINGS, USAGE, FakeEngine
from tests.service.harness import image_message, refusal, running

# ---------------------------------------------------------------- the collector


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


# ---------------------------------------------------------------- spans

QUERY = "legato.v1.InferenceService/Query"
SECRET = "a question that no span may hold"
QUESTION = inference_pb2.QueryRequest(question=SECRET)
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SERVER_KIND = 2


def traceparent(flags="01"):
    """Metadata with the caller's span."""
    return (("traceparent", f"00-{TRACE}-{PARENT}-{flags}"),)


async def traced(*calls, engine=None, **settings):
    """Make the calls; return what the collector got and the log."""
    async with collecting() as collector:
        with structlog.testing.capture_logs() as logs:
            async with running(
                engine=engine, otlp_endpoint=collector.address, **settings
            ) as server:
                for call in calls:
                    await call(server)
    return collector, [line for line in logs if line["event"] == "rpc_ended"]


async def test_a_call_has_a_span_with_its_parts():
    """The parts follow each other, within the request's span and that of the call."""

    async def detect(server):
        request = inference_pb2.DetectRequest(image=image_message(), object="cup")
        await server.inference.Detect(request)

    collector, _ = await traced(detect)
    span = collector.one("legato.v1.InferenceService/Detect")
    assert span.kind == SERVER_KIND
    assert span.parent_span_id == b""
    children = collector.children(span)
    assert set(children) == {"receive", "detect fake-1"}
    request = children["detect fake-1"]
    parts = collector.children(request)
    assert list(parts) == ["decode image", "queue", "prefill", "decode"]
    lengths = [part.end_time_unix_nano - part.start_time_unix_nano for part in parts.values()]
    expected = [TIMINGS.image, TIMINGS.queue, TIMINGS.prefill, TIMINGS.decode]
    assert [length / 1e9 for length in lengths] == pytest.approx(expected)
    at = request.start_time_unix_nano
    for part in parts.values():
        assert part.start_time_unix_nano == at
        at = part.end_time_unix_nano
    assert request.end_time_unix_nano == pytest.approx(at, abs=1000)
    assert len({s.trace_id for s in collector.spans}) == 1
    assert len({s.span_id for s in collector.spans}) == len(collector.spans) == 7
    assert collector.resources[0]["service.name"] == "legato"


async def test_attributes_tell_the_model_and_the_tokens_but_never_the_prompt():
    """Names are those of the conventions for RPCs and for generative models."""

    async def query(server):
        await server.inference.Query(QUESTION, metadata=(("legato-tenant", "acme"),))

    collector, _ = await traced(query)
    rpc = values(collector.one(QUERY).attributes)
    assert rpc["rpc.system"] == "grpc"
    assert rpc["rpc.service"] == "legato.v1.InferenceService"
    assert rpc["rpc.method"] == "Query"
    assert rpc["rpc.grpc.status_code"] == 0
    assert rpc["legato.tenant"] == "acme"
    request = values(collector.one("chat fake-1").attributes)
    assert request["gen_ai.operation.name"] == "chat"
    assert request["gen_ai.request.model"] == request["gen_ai.response.model"] == "fake-1"
    assert request["gen_ai.usage.input_tokens"] == USAGE.input_tokens
    assert request["gen_ai.usage.output_tokens"] == USAGE.output_tokens
    assert request["gen_ai.response.finish_reasons"] == ["stop"]
    assert not [span for span in collector.spans if SECRET in str(span)]


async def test_the_new_names_of_rpc_attributes_can_be_chosen(monkeypatch):
    """OTEL_SEMCONV_STABILITY_OPT_IN=rpc replaces the names, rpc/dup adds them."""

    async def query(server):
        await server.inference.Query(QUESTION)

    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "rpc")
    collector, _ = await traced(query)
    found = values(collector.one(QUERY).attributes)
    assert found["rpc.system.name"] == "grpc"
    assert (found["rpc.method"], found["rpc.response.status_code"]) == (QUERY, "OK")
    assert "rpc.system" not in found
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,rpc/dup")
    collector, _ = await traced(query)
    found = values(collector.one(QUERY).attributes)
    assert found["rpc.system"] == found["rpc.system.name"] == "grpc"


async def test_ids_agree_with_the_callers_and_with_the_log():
    """The span continues the caller's trace, and the log record names both."""

    async def query(server):
        await server.inference.Query(QUESTION, metadata=traceparent())

    collector, (line,) = await traced(query)
    span = collector.one(QUERY)
    assert span.trace_id.hex() == TRACE == line["trace_id"]
    assert span.parent_span_id.hex() == PARENT
    assert span.span_id.hex() == line["span_id"]


async def test_a_call_without_a_trace_context_begins_a_trace():
    """Its ids are in the log record too."""

    async def query(server):
        await server.inference.Query(QUESTION)

    collector, (line,) = await traced(query)
    span = collector.one(QUERY)
    assert span.trace_id.hex() == line["trace_id"]
    assert span.span_id.hex() == line["span_id"]


async def test_the_callers_decision_holds_whatever_the_ratio():
    """With ratio 0 a sampled call is traced; with ratio 1 one that is not sampled is not."""

    async def sampled(server):
        await server.inference.Query(QUESTION, metadata=traceparent())

    async def unsampled(server):
        await server.inference.Query(QUESTION, metadata=traceparent("00"))

    async def undecided(server):
        await server.inference.Query(QUESTION)

    collector, lines = await traced(sampled, unsampled, undecided, trace_ratio=0.0)
    assert len(collector.named(QUERY)) == 1
    assert [line.get("trace_id", "") for line in lines] == [TRACE, TRACE, ""]
    collector, _ = await traced(unsampled, undecided)
    (span,) = collector.named(QUERY)
    assert span.trace_id.hex() != TRACE


async def test_a_failed_call_has_its_status():
    """A server's fault is an error span with the reason; a caller's mistake is not an error."""

    def broken(engine, stream):
        engine.fail(stream, InternalError("broken"))

    async def query(server):
        await refusal(server.inference.Query(QUESTION))

    async def mistaken(server):
        await refusal(server.inference.Query(inference_pb2.QueryRequest()))

    collector, _ = await traced(query, engine=FakeEngine(broken))
    span = collector.one(QUERY)
    assert span.status.code == 2
    assert values(span.attributes)["error.type"] == "INTERNAL"
    assert values(span.attributes)["legato.error_reason"] == "INTERNAL"
    collector, _ = await traced(mistaken)
    span = collector.one(QUERY)
    assert span.status.code == 0
    assert values(span.attributes)["legato.error_reason"] == "INVALID_FIELD"


async def test_preemptions_are_events():
    """A request that was preempted says how often."""

    def preempted(engine, stream):
        done = Done(
            request_id=stream.request_id,
            result=QueryOutput(answer="yes"),
            finish_reason=FinishReason.STOP,
            usage=USAGE,
            timings=TIMINGS,
            preemptions=2,
        )
        engine.feed(stream, done)

    async def query(server):
        await server.inference.Query(QUESTION)

    collector, _ = await traced(query, engine=FakeEngine(preempted))
    (event,) = collector.one("chat fake-1").events
    assert (event.name, values(event.attributes)) == ("preempted", {"count": 2})


async def test_each_task_of_a_call_has_a_span():
    """RunTasks and Generate have their requests as children."""
    tasks = [
        task_pb2.Task(caption=task_pb2.CaptionTask()),
        task_pb2.Task(point=task_pb2.PointTask(object="cup")),
    ]

    async def run_tasks(server):
        request = inference_pb2.RunTasksRequest(image=image_message(), tasks=tasks)
        await server.inference.RunTasks(request)

    async def generate(server):
        task = task_pb2.Task(query=task_pb2.QueryTask(question=SECRET))
        async for _ in server.inference.Generate(inference_pb2.GenerateRequest(task=task)):
            pass

    collector, _ = await traced(run_tasks, generate)
    children = collector.children(collector.one("legato.v1.InferenceService/RunTasks"))
    assert set(children) == {"receive", "generate_content fake-1", "point fake-1"}
    children = collector.children(collector.one("legato.v1.InferenceService/Generate"))
    assert set(children) == {"receive", "chat fake-1"}


async def test_headers_come_from_the_standard_variables(monkeypatch):
    """OTEL_EXPORTER_OTLP_HEADERS reaches the collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hidden")

    async def query(server):
        await server.inference.Query(QUESTION)

    collector, _ = await traced(query)
    assert {each["api-key"] for each in collector.metadata} == {"hidden"}


def test_opentelemetry_is_not_imported_while_tracing_is_off():
    """A server without an endpoint does not pay for the import."""
    code = "import sys, legato_service.process; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_malformed_trace_context_begins_a_trace():
    """Nothing of it is taken over."""

    async def query(server):
        await server.inference.Query(QUESTION, metadata=(("traceparent", f"00-{TRACE}-x"),))

    collector, (line,) = await traced(query)
    span = collector.one(QUERY)
    assert span.parent_span_id == b""
    assert span.trace_id.hex() == line["trace_id"] != TRACE
