"""The status that a server ended an asyncio call with during a write."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

ValueT = TypeVar("ValueT")

_FAILED_WRITE = "Internal error from Core"
_PATIENCE = 1.0  # seconds for the status of an ended call


class ServerStatus:
    """Notes a call's status before grpc.aio writes another one over it.

    When a call ends during a write, grpc.aio ends it with an INTERNAL of its own, whether or not
    the server's status is there. The call's callbacks get both.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._error: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Replaces only an error of grpc.aio's own making."""
        if not _is_failed_write(error.code(), error.details()):
            return error
        try:
            await asyncio.wait_for(self._known.wait(), _PATIENCE)
        except TimeoutError:
            return error
        return self._error or error

    def _note(self, call: Any) -> None:
        code, details = _at_once(call.code()), _at_once(call.details())
        if not _is_failed_write(code, details):
            trailers = _at_once(call.trailing_metadata())
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)
            self._known.set()


def _is_failed_write(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and details == _FAILED_WRITE


def _at_once(coroutine: Coroutine[Any, Any, ValueT]) -> ValueT:
    """The call is done, so the coroutine has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: ValueT = done.value
        return value
    coroutine.close()
    raise AssertionError("a call that is done has a status")
