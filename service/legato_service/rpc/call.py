"""The current RPC: metadata, trace context, accounting."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Container, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc
import msgspec
from legato_engine.errors import InvalidField, LegatoError
from legato_engine.ipc.messages import Done
from legato_engine.types import RequestKey, RequestTimings, TokenUsage

from legato_service.access.credentials import IDENTIFIER
from legato_service.access.principal import Principal
from legato_service.errors import Forbidden
from legato_service.rpc.gate import GateSlot

Context = grpc.aio.ServicerContext[Any, Any]


# ---------------------------------------------------------------- trace context

KEY = "traceparent"
_FORM = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_SAMPLED = 1  # flag


class TraceParent(NamedTuple):
    """The caller's span; ids are hex digits."""

    trace_id: str
    parent_id: str
    sampled: bool


def parse(traceparent: str) -> TraceParent | None:
    """Return None when `traceparent` is malformed.

    Versions above 00 may have more parts; version ff and all-zero ids are invalid.
    """
    match = _FORM.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceParent(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


# ---------------------------------------------------------------- metadata

# Unknown keys are ignored. A malformed value raises `InvalidField` with the field
# `metadata.<key>`, except for keys that only observe: a malformed trace context is as none, as W3C
# asks.

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
    """Return the tenant; a credential has set its own before, and permits no other."""
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
    parent = parse(value)
    call.trace_id = "" if parent is None else parent.trace_id
    call.traceparent = value


def _attempts(call: Call, value: str) -> None:
    """Parse the number of attempts; malformed ones are ignored: they are for the log only."""
    if value.isascii() and value.isdigit():
        call.previous_attempts = int(value)


def _identifier(key: str, value: str) -> str:
    if ID_FORM.fullmatch(value) is None:
        raise _malformed(key, "must be 1 to 64 of A-Z a-z 0-9 . _ : -")
    return value


def _malformed(key: str, rule: str) -> InvalidField:
    return InvalidField(f"metadata {key} {rule}", field=f"metadata.{key}")


_OBSERVING = (KEY, "grpc-previous-rpc-attempts")
"""Metadata for observability: never fails a call; the first of several values counts."""

_READERS: dict[str, Callable[[Call, str], None]] = {
    PRIORITY: _priority,
    TENANT: _tenant,
    CLIENT: _client,
    REQUEST_ID: _request_id,
    KEY: _trace,
    "grpc-previous-rpc-attempts": _attempts,
}


# ---------------------------------------------------------------- call

ID_FORM = re.compile(IDENTIFIER)
"""Syntax of request and tenant ids."""


def _new_id() -> str:
    return secrets.token_hex(16)


class Call(msgspec.Struct, eq=False):
    """State of an RPC: its handlers fill it, its log record reads it.

    A struct costs a fraction of a dataclass.
    """

    method: str
    metadata: Iterable[tuple[str, str | bytes]] = ()
    request_id: str = msgspec.field(default_factory=_new_id)
    is_named: bool = False  # by the client or a proxy
    started: float = msgspec.field(default_factory=time.monotonic)
    principal: Principal | None = None  # None: without a credential
    tenant: str = ""  # the principal's, if any; else from the metadata
    priority: int = 0
    client: str = ""  # name and version of its software
    trace_id: str = ""
    previous_attempts: int = 0  # gRPC's own retries
    is_let_in: bool = False  # its credential, if it needs one, allows it
    refusal: LegatoError | None = None  # credential error, found before the message is received
    is_identified: bool = False  # its tenant and priority are final
    gate_slot: GateSlot | None = None  # set if the gate counts the call
    receiving_since: float = math.inf  # time.monotonic() seconds; infinite: not now
    senders: tuple[str, str] | None = None  # of its messages: `senders()`, once they are needed
    is_late: bool = False  # its message did not arrive in time
    seconds_held: float = 0.0  # of the event loop by its last message, before the handler ran
    received: bytes = b""  # the serialized request of a unary RPC
    deadline: float | None = None  # absolute time.monotonic() seconds
    reply: str = ""  # `joined` or `kept`: the reply of another call
    usage: TokenUsage | None = None
    timings: RequestTimings | None = None
    estimated_wait: float | None = None  # seconds, when a request of it was admitted
    traceparent: str = ""
    is_traced: bool | None = None  # None until the tracer decides
    parent_id: str = ""  # the caller's span
    span_id: str = ""  # the call's own span
    arrived_ns: int = 0  # when its first request reached the engine, in `time.time_ns()`
    on_done: Callable[[Call, Done], None] | None = None  # takes the end of each request of it
    resumptions: int = 0

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.tenant)

    def adopt(self, request_id: str) -> RequestKey:
        """Take the client's id, unless it is empty.

        Raises:
            InvalidField: the id is malformed.
        """
        if request_id:
            if ID_FORM.fullmatch(request_id) is None:
                raise InvalidField(
                    "request_id holds at most 64 of A-Z a-z 0-9 . _ : -", field="options.request_id"
                )
            self.request_id = request_id
        return self.key

    def avoid(self, taken: Container[RequestKey]) -> RequestKey:
        """Replace an id that is taken and came by metadata; return the key.

        A proxy may send the same `x-request-id` with several requests.
        """
        if self.is_named and self.key in taken:
            self.rename()
        return self.key

    def rename(self) -> None:
        self.request_id = _new_id()


CURRENT: ContextVar[Call] = ContextVar("legato_call")
"""Set by `RpcMiddleware` for the length of an RPC."""


current = CURRENT.get
"""Return the current RPC; only for code that handles one."""


def total(usages: Iterable[TokenUsage]) -> TokenUsage:
    counts = [msgspec.structs.astuple(each) for each in usages]
    none = (0,) * len(TokenUsage.__struct_fields__)
    return TokenUsage(*map(sum, zip(none, *counts, strict=True)))


# ---------------------------------------------------------------- whom a call counts for

_THIS_HOST = ("ipv4:127.", "ipv6:%5B::1%5D", "unix:")
_FORWARDED = "x-forwarded-for"


def quota_owner(context: Context) -> str:
    """Return the quota's owner: the call's tenant, else the client's host."""
    tenant = current().tenant
    return f"tenant:{tenant}" if tenant else f"peer:{_host(context.peer())}"


def senders(call: Call, context: Context) -> tuple[str, str]:
    """Return the sender of a call's messages, and its connection.

    The sender is a host with the tenant of its credential. On this host it is a connection, because
    proxies and programs of different users call from here. Behind a proxy both are of one caller,
    if the proxy names it.
    """
    connection = context.peer()
    sender = connection if connection.startswith(_THIS_HOST) else _host(connection)
    if call.principal is not None:
        sender = f"{call.principal.tenant} {sender}"
    for key, value in call.metadata or context.invocation_metadata() or ():
        if key == _FORWARDED:
            name = str(value).rpartition(",")[2].strip()
            return f"{sender} {name}", f"{connection} {name}"
    return sender, connection


def _host(peer: str) -> str:
    """Remove the port of `ipv4:10.0.0.7:5000` or `ipv6:[::1]:5000`."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
