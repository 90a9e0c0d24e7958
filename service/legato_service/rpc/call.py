"""One RPC as the log will tell it: its names, and what it cost."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterable, Iterator
from contextvars import ContextVar

import msgspec
from legato_engine import core
from legato_engine.core import RequestKey
from legato_engine.errors import InvalidField

ID_FORM = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""What callers may name requests and tenants."""

_ID_BYTES = 16
_IDS_AT_ONCE = 64


def _ids() -> Iterator[str]:
    """32 hexadecimal digits each, which nobody else's ids are."""
    while True:
        digits = os.urandom(_ID_BYTES * _IDS_AT_ONCE).hex()
        for at in range(0, len(digits), 2 * _ID_BYTES):
            yield digits[at : at + 2 * _ID_BYTES]


_new_id = _ids().__next__


class Call(msgspec.Struct, eq=False):
    """Filled while the RPC runs, by whoever knows; read once, by the log line at its end.

    A struct, as these cost a fraction of what an `__init__` does.
    """

    method: str
    metadata: Iterable[tuple[str, str | bytes]] = ()  # as the peer sent it
    request_id: str = msgspec.field(default_factory=_new_id)
    is_named: bool = False  # by somebody else than this server
    started: float = msgspec.field(default_factory=time.monotonic)
    tenant: str = ""  # whom the call counts for, as it says
    priority: int = 0
    client: str = ""  # the calling software
    trace_id: str = ""
    previous_attempts: int = 0  # of gRPC's own retries
    received: bytes = b""  # the request of a unary one
    deadline: float | None = None  # absolute time.monotonic() seconds
    reply: str = ""  # `joined` or `kept`: another call's; see `replies`
    usage: core.Usage | None = None
    timings: core.Timings | None = None

    @property
    def key(self) -> RequestKey:
        """The key of the call's request."""
        return RequestKey(self.request_id, self.tenant)

    def adopt(self, request_id: str) -> RequestKey:
        """Take the caller's id when it gave one; raises `InvalidField` when it is malformed."""
        if request_id:
            if ID_FORM.fullmatch(request_id) is None:
                raise InvalidField(
                    "request_id holds at most 64 of A-Z a-z 0-9 . _ : -", field="options.request_id"
                )
            self.request_id = request_id
        return self.key

    def avoid(self, taken: Container[RequestKey]) -> RequestKey:
        """The call's key, whose id its caller did not give in the request; another if it is taken.

        What a proxy sends as `x-request-id` names a request, too, but it may send it with several.
        """
        if self.is_named and self.key in taken:
            self.rename()
        return self.key

    def rename(self) -> None:
        """Take an id of the server's own making."""
        self.request_id = _new_id()


CURRENT: ContextVar[Call] = ContextVar("legato_call")
"""Set by the boundary for the length of an RPC."""


current = CURRENT.get
"""The RPC that is being handled; only inside one."""


def total(usages: Iterable[core.Usage]) -> core.Usage:
    """What several tasks cost together."""
    input_tokens = output_tokens = cached = image = reasoning = 0
    for usage in usages:
        input_tokens += usage.input_tokens
        output_tokens += usage.output_tokens
        cached += usage.cached_tokens
        image += usage.image_tokens
        reasoning += usage.reasoning_tokens
    return core.Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        image_tokens=image,
        reasoning_tokens=reasoning,
    )
