"""An engine as the service sees it; `EngineConnection` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from legato_engine.client.connection import Siblings
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream, Restage, StreamOutput
from legato_engine.client.timeline_watch import TimelineWatch
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    HoldImage,
    ImageHeld,
    ImageTotals,
    Load,
    ModelInfo,
    StepTotals,
)
from legato_engine.shm.blob_store import BlobStore
from legato_engine.types import Request


class Stream(Protocol):
    """The outputs of one request, in order; `Done` is the last. A failure is raised as its error.

    Unread deltas are merged, so one result's text bounds the memory of a slow reader.
    """

    @property
    def ended(self) -> bool: ...

    async def __anext__(self) -> StreamOutput: ...

    def done(self) -> Awaitable[Done]:
        """Skip the outputs before `Done`."""
        ...

    def stop(self) -> None:
        """Stop the request; a partial `Done` follows."""
        ...

    def abort(self, error: LegatoError | None = None) -> None: ...


class Engine(Protocol):
    """Engine of one event loop. `load` and `step` are of the last heartbeat."""

    siblings: Siblings | None

    @property
    def number(self) -> int:
        """Among the engines of the server, from 0."""
        ...

    @property
    def device(self) -> str:
        """Return the device as the operator named it."""
        ...

    @property
    def blobs(self) -> BlobStore:
        """Return the store in which its requests' images are staged."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def model(self) -> ModelInfo | None: ...

    @property
    def load(self) -> Load: ...

    @property
    def step(self) -> int:
        """Launches committed."""
        ...

    @property
    def step_totals(self) -> StepTotals: ...

    @property
    def image_totals(self) -> ImageTotals: ...

    @property
    def pid(self) -> int:
        """0 before the first engine was ready."""
        ...

    @property
    def restarts(self) -> int:
        """Engines that followed a lost one; 0 in a worker process."""
        ...

    @property
    def resumptions(self) -> int:
        """Requests of this process that went on with another engine."""
        ...

    @property
    def num_poisoned(self) -> int:
        """Requests of this process that ended because they had ended engines."""
        ...

    @property
    def timeline(self) -> TimelineWatch: ...

    @property
    def last_heartbeat(self) -> float:
        """Monotonic seconds."""
        ...

    @property
    def estimated_wait(self) -> float:
        """Seconds that a new request would wait."""
        ...

    @property
    def num_open(self) -> int:
        """Requests of this process that have not ended."""
        ...

    @property
    def num_elsewhere(self) -> int:
        """Requests of other service processes, by the last heartbeat."""
        ...

    def subscribe(self, callback: Callable[[EngineState], None]) -> object: ...

    def expect(self) -> None:
        """Announce that a request may be submitted soon."""
        ...

    def submit(
        self, request: Request, restage: Restage | None = None, *, may_wait: bool = False
    ) -> Stream:
        """Submit a request; it may stage its image again, or wait for an engine (`may_wait`)."""
        ...

    def adopt(self, stream: RequestStream, *, renew: bool = True) -> None:
        """Run the request of another engine; without `renew` it is sent as it is."""
        ...

    def offer_waiting(self) -> None:
        """Offer the requests that wait for this engine to `siblings`."""
        ...

    def set_pipeline_depth(self, depth: int) -> None:
        """Set the pipeline depth from the next step until this engine ends."""
        ...

    async def hold(self, command: HoldImage) -> ImageHeld: ...

    async def drop(self, command: DropImage) -> None: ...

    def drain(self) -> None: ...
