"""The engine as the service sees it: `EngineClient`, or a fake of it in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from legato_engine import core
from legato_engine.client.engine_client import EngineState
from legato_engine.client.request_stream import StreamOutput
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Done, DropImage, HoldImage, ImageHeld, Load, ModelInfo


class Stream(Protocol):
    """Reports of one request, in order; `Done` is the last. A failure is raised as its error.

    Unread `Delta`s are joined, so a slow reader holds at most one answer's worth of text.
    """

    @property
    def ended(self) -> bool:
        """Whether nothing more will be added; there may still be reports to read."""
        ...

    async def __anext__(self) -> StreamOutput:
        """The next report; StopAsyncIteration after `Done`."""
        ...

    def done(self) -> Awaitable[Done]:
        """The `Done`, without the reports before it."""
        ...

    def stop(self) -> None:
        """Have the engine end it now: `Done` says CANCELLED and holds what there is by then."""
        ...

    def abort(self, error: LegatoError | None = None) -> None:
        """Have the engine forget the request; harmless after its end and when repeated.

        Who reads is given `error`; without one the stream just ends.
        """
        ...


class Engine(Protocol):
    """Where requests go. Only ever used from one event loop."""

    @property
    def state(self) -> EngineState:
        """Where the engine process stands."""
        ...

    @property
    def model(self) -> ModelInfo | None:
        """What it serves, once it has said so."""
        ...

    @property
    def load(self) -> Load:
        """What it holds, as of the last heartbeat."""
        ...

    @property
    def step(self) -> int:
        """Launches committed, as of the last heartbeat."""
        ...

    @property
    def last_heartbeat(self) -> float:
        """When the engine process last gave a sign of life, `time.monotonic()` seconds."""
        ...

    @property
    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait."""
        ...

    def subscribe(self, callback: Callable[[EngineState], None]) -> object:
        """Be told of every change of `state`."""
        ...

    def expect(self) -> None:
        """A request is about to be submitted, as soon as it is read; or not."""
        ...

    def submit(self, request: core.Request) -> Stream:
        """Start a request, registered before this returns.

        Raises `EngineStarting`, `EngineLost` or `Draining`. The picture's blob is the engine's to
        discard from here on, also when this raises.
        """
        ...

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Hold a picture; its blob is the engine's to discard, also when this raises.

        Raises as `submit`, what is wrong with the picture, and `QuotaExceeded`.
        """
        ...

    async def drop(self, command: DropImage) -> None:
        """Hold a picture no longer. Raises as `submit`, and `ImageNotFound`."""
        ...

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        ...
