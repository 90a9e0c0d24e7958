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
        """Whether the last output has arrived; outputs may still be unread."""
        ...

    async def __anext__(self) -> StreamOutput:
        """Return the next output; StopAsyncIteration after `Done`."""
        ...

    def done(self) -> Awaitable[Done]:
        """Return the `Done`, without the outputs before it."""
        ...

    def stop(self) -> None:
        """Have the engine end the request now; `Done` holds its partial result."""
        ...

    def abort(self, error: LegatoError | None = None) -> None:
        """Abort the request in the engine. Idempotent.

        If the request had not ended, its reader gets `error`, or the end without one.
        """
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
        """When the last heartbeat arrived, in `time.monotonic()` seconds."""
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
        """Start a request; the engine discards the image's blob, also when this raises.

        Raises:
            EngineStarting: the engine is not ready yet.
            EngineLost: the engine is being restarted.
            Draining: the server is shutting down.
        """
        ...

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Hold an image; the engine discards its blob, also when this raises.

        Raises:
            QuotaExceeded: the owner's quota of bytes is used up.
            InvalidRequest: the image cannot be decoded or is too large.
            LegatoError: as `submit`.
        """
        ...

    async def drop(self, command: DropImage) -> None:
        """End a hold.

        Raises:
            ImageNotFound: the owner holds no such image.
            LegatoError: as `submit`.
        """
        ...

    def drain(self) -> None:
        """Refuse new requests and finish the open ones."""
        ...
