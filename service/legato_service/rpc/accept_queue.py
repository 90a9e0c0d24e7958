"""The calls that gRPC has received and this process has not accepted yet.

gRPC hands calls over one at a time, at most as fast as the event loop turns. The others wait in
gRPC's core, where only channelz counts them. Beyond `grpc.server.max_pending_requests` the core
cancels calls at random, without a status that this process sees or chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # what grpcio-channelz uses

ServerT = TypeVar("ServerT")


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    calls_started: str = "0"  # 64-bit numbers are strings in protobuf's JSON
    calls_succeeded: str = "0"
    calls_failed: str = "0"


class _Ref(msgspec.Struct, frozen=True, rename="camel"):
    server_id: str = "0"


class _Server(msgspec.Struct, frozen=True):
    ref: _Ref = _Ref()
    data: _Data = _Data()


class _One(msgspec.Struct):
    server: _Server = _Server()


class _Page(msgspec.Struct):
    server: list[_Server] = []


_read_page = msgspec.json.Decoder(_Page).decode
_read_one = msgspec.json.Decoder(_One).decode


class AcceptQueue:
    """The queue of one server. Reading its length takes about as long as half a call."""

    def __init__(self, server_id: int) -> None:
        self._server_id = server_id
        self._never_accepted = 0  # of the calls counted as received
        self.num_accepted = 0  # counted by the owner

    @classmethod
    def of_new(cls, make_server: Callable[[], ServerT]) -> tuple[ServerT, AcceptQueue]:
        """Make a server, and return it with its queue."""
        known = _server_ids()
        server = make_server()
        (new,) = _server_ids() - known or {0}
        return server, cls(new)

    def num_waiting(self) -> int:
        received, open_calls = self._count()
        return max(0, min(received - self.num_accepted - self._never_accepted, open_calls))

    def settle(self) -> None:
        """Take the queue to be empty: calls that are missing now were cancelled in it."""
        received, _ = self._count()
        self._never_accepted = received - self.num_accepted

    def _count(self) -> tuple[int, int]:
        """Return the calls received, and those of them that have not ended."""
        if not self._server_id:
            return self.num_accepted + self._never_accepted, 0
        data = _read_one(cygrpc.channelz_get_server(self._server_id)).server.data
        received = int(data.calls_started)
        return received, received - int(data.calls_succeeded) - int(data.calls_failed)


def _server_ids() -> set[int]:
    return {int(each.ref.server_id) for each in _read_page(cygrpc.channelz_get_servers(0)).server}
