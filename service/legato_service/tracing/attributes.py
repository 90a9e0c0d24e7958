"""Attributes of spans; never a prompt, an image or an answer."""

from __future__ import annotations

import os
from collections.abc import Mapping

import grpc
from legato_engine.core.results import SKILL_OF_RESULT, CaptionResult, QueryResult

from legato_service.rpc.call import Call
from legato_service.rpc.call_log import EndedRequest

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]

PROVIDER = "legato"
OPERATIONS: Mapping[type, str] = {
    **SKILL_OF_RESULT,
    # OpenTelemetry has names for these two.
    QueryResult: "chat",
    CaptionResult: "generate_content",
}
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}
_FAULTS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Codes with which a server's span is an error; the others are the caller's."""


def is_fault(code: str) -> bool:
    return code in _FAULTS


class RpcConvention:
    """The attributes of RPCs, whose names changed.

    `OTEL_SEMCONV_STABILITY_OPT_IN` chooses as OpenTelemetry specifies it: `rpc` the new ones,
    `rpc/dup` both, otherwise the old ones.
    """

    def __init__(self, opt_in: str | None = None) -> None:
        text = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "") if opt_in is None else opt_in
        chosen = {each.strip() for each in text.split(",")}
        self._new = bool(chosen & {"rpc", "rpc/dup"})
        self._old = "rpc" not in chosen

    def attributes(self, call: Call, code: str, reason: str) -> Attributes:
        path = call.method.lstrip("/")
        service, _, method = path.rpartition("/")
        found: Attributes = {"legato.request_id": call.request_id}
        if self._old:
            found |= {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "rpc.grpc.status_code": _CODES.get(code, 2),
            }
        if self._new:
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


def of_request(request: EndedRequest, model: str) -> Attributes:
    usage = request.usage
    return {
        "gen_ai.operation.name": OPERATIONS.get(request.result, "generate_content"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (request.finish_reason.value,),
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "legato.image_tokens": usage.image_tokens,
    }
