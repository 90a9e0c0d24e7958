# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""The seam between what a call means and how its bytes travel.

`ClientMethods` is written once, as coroutines over this seam. Over asyncio they suspend as any
coroutine; over a blocking channel each step blocks instead, so a coroutine completes without an
event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from legato_client._transport.methods import Method

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


class Transport(Protocol):
    """Sends requests that are bytes already; `timeout` is the gRPC deadline in seconds.

    Failures are raised as `LegatoError`.
    """

    async def unary(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float
    ) -> ResponseT:
        """One request, one response."""
        ...

    async def upload(
        self, method: Method[ResponseT, ValueT], requests: Iterator[bytes], timeout: float
    ) -> ResponseT:
        """Many requests, one response."""
        ...

    def stream(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float
    ) -> AsyncGenerator[ResponseT, None]:
        """One request, many responses; closing it early cancels the call."""
        ...

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        """Run blocking or slow work without blocking the event loop."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...
