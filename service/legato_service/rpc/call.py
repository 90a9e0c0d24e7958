"""The current RPC."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Container, Iterable
from contextvars import ContextVar

import msgspec
from legato_engine.core.request_key import RequestKey
from legato_engine.core.results import Timings, Usage
from legato_engine.errors import InvalidField, LegatoError
from legato_engine.ipc.messages import Done

from legato_service.access.identifiers import IDENTIFIER
from legato_service.access.principal import Principal
from legato_service.rpc.gate import Place

ID_FORM = re.compile(IDENTIFIER)
"""The form of the ids that clients give to requests and tenants."""


_ID_BYTES = 16
_NUM_DRAWN = 64
_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)  # parent and child would give the same ids


def _new_id() -> str:
    """Return a random id; one system call draws many."""
    if not _drawn:
        text = os.urandom(_ID_BYTES * _NUM_DRAWN).hex()
        size = 2 * _ID_BYTES
        _drawn.extend(text[start : start + size] for start in range(0, len(text), size))
    return _drawn.pop()


class Call(msgspec.Struct, eq=False):
    """One RPC. Its handlers fill it; the log record at its end reads it.

    A struct costs a fraction of a dataclass.
    """

    method: str
    metadata: Iterable[tuple[str, str | bytes]] = ()
    request_id: str = msgspec.field(default_factory=_new_id)
    is_named: bool = False  # by the client or a proxy
    started: float = msgspec.field(default_factory=time.monotonic)
    principal: Principal | None = None  # None: without a credential
    tenant: str = ""  # the principal's, if any; else as the caller says
    priority: int = 0
    client: str = ""  # name and version of its software
    trace_id: str = ""
    previous_attempts: int = 0  # of gRPC's own retries
    is_let_in: bool = False  # its credential, if it needs one, allows it
    refusal: LegatoError | None = None  # of its credential, before its message is received
    is_identified: bool = False  # its tenant and priority are final
    place: Place | None = None  # of a call that the gate counts
    received: bytes = b""  # the serialized request of a unary RPC
    deadline: float | None = None  # absolute time.monotonic() seconds
    reply: str = ""  # `joined` or `kept`: the reply of another call
    usage: Usage | None = None
    timings: Timings | None = None
    estimated_wait: float | None = None  # seconds, when a request of it was admitted
    traceparent: str = ""
    is_traced: bool | None = None  # None until the tracer decides
    parent_id: str = ""  # of the caller's span
    span_id: str = ""  # of its own span
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
"""Returns the current RPC. Only for code that handles one."""


def total(usages: Iterable[Usage]) -> Usage:
    input_tokens = output_tokens = cached = image = reasoning = 0
    for usage in usages:
        input_tokens += usage.input_tokens
        output_tokens += usage.output_tokens
        cached += usage.cached_tokens
        image += usage.image_tokens
        reasoning += usage.reasoning_tokens
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        image_tokens=image,
        reasoning_tokens=reasoning,
    )
