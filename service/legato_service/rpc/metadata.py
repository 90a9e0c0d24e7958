"""The metadata of a call.

Unknown keys are ignored. A malformed value raises `InvalidField` with the field `metadata.<key>`,
except for keys that only observe: a malformed trace context is as none, as W3C asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from legato_engine.errors import InvalidField

from legato_service.errors import Forbidden
from legato_service.rpc import trace_context
from legato_service.rpc.call import ID_FORM, Call

PRIORITY = "legato-priority"
TENANT = "legato-tenant"
CLIENT = "legato-client"
REQUEST_ID = "x-request-id"
MIN_PRIORITY, MAX_PRIORITY = -100, 100
MAX_CLIENT = 128  # characters

_INTEGER = re.compile(r"-?[0-9]{1,3}")


def read(call: Call) -> None:
    """Move the call's metadata into its fields.

    Raises:
        InvalidField: a key was sent twice, or its value is malformed.
        Forbidden: another tenant is named than the credential's.
    """
    seen: list[str] = []
    metadata, call.metadata = call.metadata, ()
    for key, value in metadata:
        reader = _READERS.get(key)
        if reader is None:
            continue
        if key not in seen and isinstance(value, str):
            seen.append(key)
            reader(call, value)
        elif key not in _OBSERVING:
            raise _malformed(key, "must be one value")


def _priority(call: Call, value: str) -> None:
    number = int(value) if _INTEGER.fullmatch(value) else MAX_PRIORITY + 1
    if not MIN_PRIORITY <= number <= MAX_PRIORITY:
        raise _malformed(PRIORITY, f"must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}")
    call.priority = number


def _tenant(call: Call, value: str) -> None:
    """A credential has set its own tenant before, and permits no other."""
    tenant = _identifier(TENANT, value)
    if call.tenant and tenant != call.tenant:
        raise Forbidden("the credential is of another tenant", field=f"metadata.{TENANT}")
    call.tenant = tenant


def _client(call: Call, value: str) -> None:
    if len(value) > MAX_CLIENT:
        raise _malformed(CLIENT, f"must have at most {MAX_CLIENT} characters")
    call.client = value


def _request_id(call: Call, value: str) -> None:
    call.request_id = _identifier(REQUEST_ID, value)
    call.is_named = True


def _trace(call: Call, value: str) -> None:
    call.trace_id = trace_context.trace_id(value)
    call.traceparent = value


def _attempts(call: Call, value: str) -> None:
    """Malformed counts are ignored: they are for the log only."""
    if value.isascii() and value.isdigit():
        call.previous_attempts = int(value)


def _identifier(key: str, value: str) -> str:
    if ID_FORM.fullmatch(value) is None:
        raise _malformed(key, "must be 1 to 64 of A-Z a-z 0-9 . _ : -")
    return value


def _malformed(key: str, rule: str) -> InvalidField:
    return InvalidField(f"metadata {key} {rule}", field=f"metadata.{key}")


_OBSERVING = (trace_context.KEY, "grpc-previous-rpc-attempts")
"""They never fail a call; of several values the first counts."""

_READERS: dict[str, Callable[[Call, str], None]] = {
    PRIORITY: _priority,
    TENANT: _tenant,
    CLIENT: _client,
    REQUEST_ID: _request_id,
    trace_context.KEY: _trace,
    "grpc-previous-rpc-attempts": _attempts,
}
