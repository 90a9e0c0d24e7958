"""OpenTelemetry spans of calls, made after their end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from legato_engine.ipc.messages import Done
from legato_engine.types import SKILL_OF_RESULT, CaptionOutput, QueryOutput
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from legato_service.rpc.call import Call
from legato_service.rpc.call import parse as parse_trace_parent
from legato_service.rpc.call_log import DEBUG_METHODS, EndedCall, EndedRequest

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]

PROVIDER = "legato"
OPERATIONS: Mapping[type, str] = {
    **SKILL_OF_RESULT,
    # OpenTelemetry has names for these two.
    QueryOutput: "chat",
    CaptionOutput: "generate_content",
}
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}
_FAULTS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Codes that mark a server span as failed; other codes are the caller's fault."""


def of_request(done: Done, model: str) -> Attributes:
    usage = done.usage
    return {
        "gen_ai.operation.name": OPERATIONS.get(type(done.result), "generate_content"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (done.finish_reason.value,),
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "legato.image_tokens": usage.image_tokens,
    }


# ---------------------------------------------------------------- exporter

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


# ---------------------------------------------------------------- tracer

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("legato_service")
_SECOND = 1_000_000_000  # nanoseconds
_SESSION = "/legato.v1.SessionService/"


class Tracer:
    """Traces calls; `observe` is a `call_log.CallObserver`.

    A call with a trace context is traced as its caller decided; of the others the share `ratio` is.
    `model` returns the name of the served model.
    """

    def __init__(
        self, processor: SpanProcessor, ratio: float, model: Callable[[], str] = lambda: ""
    ) -> None:
        self._processor = processor
        self._sampler = TraceIdRatioBased(ratio)
        self._model = model
        self._ids = RandomIdGenerator()
        conventions = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        self._conventions = {each.strip() for each in conventions}
        self._resource = Resource.create({"service.name": "legato"})

    def observe(self, calls: Sequence[EndedCall], requests: Sequence[EndedRequest]) -> None:
        for call, done, ended_ns in requests:
            if self._is_traced(call):
                self._add_request(call, done, ended_ns)
        clock_offset = time.time_ns() - time.monotonic_ns()
        for call, code, reason, seconds, ended_ns in calls:
            if self._is_traced(call):
                self._add_call(call, code, reason, ended_ns - round(seconds * _SECOND), ended_ns)
                if call.arrived_ns:
                    started_ns = round(call.started * _SECOND) + clock_offset
                    self._add(call, "receive", min(started_ns, call.arrived_ns), call.arrived_ns)

    async def close(self) -> None:
        """Send what waits."""
        await asyncio.to_thread(self._processor.shutdown)

    # ------------------------------------------------------------ which

    def _is_traced(self, call: Call) -> bool:
        if call.is_traced is None:
            call.is_traced = self._decide(call)
        return call.is_traced

    def _decide(self, call: Call) -> bool:
        if call.method.startswith(DEBUG_METHODS):
            return False
        parent = parse_trace_parent(call.traceparent)
        if parent is not None:
            if not parent.sampled:
                return False
            call.parent_id = parent.parent_id
        else:
            trace_id = self._ids.generate_trace_id()
            decision = self._sampler.should_sample(None, trace_id, "").decision
            if decision is not Decision.RECORD_AND_SAMPLE:
                return False
            call.trace_id = f"{trace_id:032x}"
        call.span_id = f"{self._ids.generate_span_id():016x}"
        return True

    # ------------------------------------------------------------ spans

    def _add_call(self, call: Call, code: str, reason: str, started_ns: int, ended_ns: int) -> None:
        parent = _context(call, call.parent_id, is_remote=True) if call.parent_id else None
        self._end(
            call.method.lstrip("/"),
            _context(call, call.span_id),
            parent,
            started_ns,
            ended_ns,
            attributes=self._of_call(call, code, reason),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR) if code in _FAULTS else Status(),
        )

    def _of_call(self, call: Call, code: str, reason: str) -> Attributes:
        """Return the attributes of an RPC, whose names changed.

        `OTEL_SEMCONV_STABILITY_OPT_IN` chooses as OpenTelemetry specifies it: `rpc` the new ones,
        `rpc/dup` both, otherwise the old ones.
        """
        path = call.method.lstrip("/")
        service, _, method = path.rpartition("/")
        found: Attributes = {"legato.request_id": call.request_id}
        if "rpc" not in self._conventions:
            found |= {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "rpc.grpc.status_code": _CODES.get(code, 2),
            }
        if self._conventions & {"rpc", "rpc/dup"}:
            found |= {
                "rpc.system.name": "grpc",
                "rpc.method": path,
                "rpc.response.status_code": code,
            }
        if code != "OK":
            found["error.type"] = code
        if reason:
            found["legato.error_reason"] = reason
        if call.tenant:
            found["legato.tenant"] = call.tenant
        return found

    def _add_request(self, call: Call, done: Done, ended_ns: int) -> None:
        """Add the request's span, and a span for each of its parts."""
        timings = done.timings
        arrived_ns = ended_ns - round(timings.total * _SECOND)
        if not call.arrived_ns and not call.method.startswith(_SESSION):
            call.arrived_ns = arrived_ns
        model = self._model()
        given = of_request(done, model)
        name = f"{given['gen_ai.operation.name']} {model}".rstrip()
        events = [
            Event(event, {"count": count}, ended_ns)
            for event, count in (
                ("preempted", done.preemptions),
                ("resumed", done.resumptions),
            )
            if count
        ]
        parent = self._add(call, name, arrived_ns, ended_ns, attributes=given, events=events)
        at = arrived_ns
        for part, seconds in (
            ("decode image", timings.image),
            ("queue", timings.queue),
            ("prefill", timings.prefill),
            ("decode", timings.decode),
        ):
            end = at + round(seconds * _SECOND)
            if seconds or part != "decode image":
                self._add(call, part, at, end, parent=parent)
            at = end

    def _add(
        self,
        call: Call,
        name: str,
        started_ns: int,
        ended_ns: int,
        *,
        parent: SpanContext | None = None,
        attributes: Attributes | None = None,
        events: Sequence[Event] = (),
    ) -> SpanContext:
        """Add a child of `parent`, by default of the call's own span."""
        context = _context(call, f"{self._ids.generate_span_id():016x}")
        self._end(
            name,
            context,
            _context(call, call.span_id) if parent is None else parent,
            started_ns,
            ended_ns,
            attributes=attributes or {},
            events=events,
        )
        return context

    def _end(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        started_ns: int,
        ended_ns: int,
        **fields: Any,
    ) -> None:
        span = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            start_time=started_ns,
            end_time=ended_ns,
            instrumentation_scope=_SCOPE,
            **fields,
        )
        self._processor.on_end(span)


def _context(call: Call, span_id: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(call.trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)
