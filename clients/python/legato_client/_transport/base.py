# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""The seam between what a call means and how its bytes travel.

`ClientMethods` is written once, as coroutines. Over a blocking channel each step blocks, so they
complete without an event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from legato_client._transport.methods import Method

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


class Transport(Protocol):
    """Sends serialized requests; `timeout` is the gRPC deadline in seconds,
    `affinity` what a proxy chooses the server by.

    Failures are raised as `LegatoError`.
    """

    async def unary(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> ResponseT: ...

    async def upload(
        self,
        method: Method[ResponseT, ValueT],
        requests: Iterator[bytes],
        timeout: float,
        affinity: str,
    ) -> ResponseT: ...

    def stream(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        """Closing it early cancels the call."""
        ...

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        """Does not block the event loop."""
        ...

    async def sleep(self, seconds: float) -> None: ...
