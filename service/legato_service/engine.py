"""The engine as the service sees it; `EngineConnection` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from legato_engine import core
from legato_engine.client.engine_client import EngineState
from legato_engine.client.request_stream import StreamOutput
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Done, DropImage, HoldImage, ImageHeld, Load, ModelInfo


class Stream(Protocol):
    """The outputs of one request, in order; `Done` is the last. A failure is raised as its error.

    Unread deltas are merged, so that the text of one result bounds the memory of a slow reader.
    """

    @property
    def ended(self) -> bool:
        """Whether the last output has arrived."""
        ...

    async def __anext__(self) -> StreamOutput:
        """Return the next output; StopAsyncIteration after `Done`."""
        ...

    def done(self) -> Awaitable[Done]:
        """Return the `Done`, without the outputs before it."""
        ...

    def stop(self) -> None:
        """End the request now with a partial `Done`."""
        ...

    def abort(self, error: LegatoError | None = None) -> None:
        """Abort the request, as `RequestStream.abort` does."""
        ...


class Engine(Protocol):
    """Runs requests. Belongs to one event loop."""

    @property
    def state(self) -> EngineState:
        """The state of the engine process."""
        ...

    @property
    def model(self) -> ModelInfo | None:
        """The served model, once it is known."""
        ...

    @property
    def load(self) -> Load:
        """Load, as of the last heartbeat."""
        ...

    @property
    def step(self) -> int:
        """Launches committed, as of the last heartbeat."""
        ...

    @property
    def last_heartbeat(self) -> float:
        """Arrival of the last heartbeat, in monotonic seconds."""
        ...

    @property
    def estimated_wait(self) -> float:
        """Seconds that a new request would wait."""
        ...

    def subscribe(self, callback: Callable[[EngineState], None]) -> object:
        """Call `callback` with every new state."""
        ...

    def expect(self) -> None:
        """Announce that a request may be submitted soon."""
        ...

    def submit(self, request: core.Request) -> Stream:
        """Start a request, as `EngineConnection.submit` does."""
        ...

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Hold an image, as `EngineConnection.hold` does."""
        ...

    async def drop(self, command: DropImage) -> None:
        """End a hold, as `EngineConnection.drop` does."""
        ...

    def drain(self) -> None:
        """Refuse new requests and finish the open ones."""
        ...
