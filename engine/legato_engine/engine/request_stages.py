"""The stages of a request in the engine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from legato_engine.core.images import ImageInfo
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.core.results import Outline
from legato_engine.core.tokens import TokenInfo
from legato_engine.engine.lazy import Lazy
from legato_engine.engine.loaded_image import PendingImage, PreprocessedImage
from legato_engine.ipc.commands import HoldImage
from legato_engine.ipc.messages import Done
from legato_engine.models.capabilities import Adapter
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.launch import Refinement
from legato_engine.tasks import Task

Future = concurrent.futures.Future


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Stage:
    """Base of all stages; `deadline` is in monotonic seconds."""

    takes_queue_place: ClassVar[bool] = True
    """Whether it counts against the queue's limits although it is not in the queue."""

    request_id: RequestKey
    tenant: str
    deadline: float = math.inf

    @property
    def futures(self) -> Sequence[Future[Any]]:
        """Work on other threads that the stage waits for."""
        return ()

    def cancel(self) -> None:
        """Cancel the futures that have not started."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest(Stage):
    """A request whose image, adapter or long text is being prepared.

    `text` is done when `task` is computed; None: that was done at once.
    """

    request: Request
    arrival: float
    task: Lazy[Task]
    text: Future[Task] | None
    image: PendingImage | None
    adapter: Future[Adapter] | None

    @property
    def futures(self) -> Sequence[Future[Any]]:
        parts = (self.image, self.adapter, self.text)
        return [part for part in parts if isinstance(part, Future)]

    @property
    def is_ready(self) -> bool:
        return all(future.done() for future in self.futures)

    @property
    def failure(self) -> BaseException | None:
        failures = (future.exception() for future in self.futures if future.done())
        return next((failure for failure in failures if failure is not None), None)

    @property
    def prepared_image(self) -> PreprocessedImage | None:
        return self.image.result() if isinstance(self.image, Future) else self.image

    @property
    def prepared_adapter(self) -> Adapter | None:
        return None if self.adapter is None else self.adapter.result()

    def cancel(self) -> None:
        """Cancel the image and the text; other requests may wait for the adapter."""
        for part in (self.image, self.text):
            if isinstance(part, Future):
                part.cancel()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingLease(Stage):
    """A `HoldImage` whose image is being prepared."""

    command: HoldImage
    image: Future[PreprocessedImage]

    @property
    def futures(self) -> Sequence[Future[Any]]:
        return (self.image,)

    def cancel(self) -> None:
        self.image.cancel()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(Stage):
    """A request in the scheduler, which enforces the deadline.

    `refinable` is the image to refine an outline with.
    """

    takes_queue_place: ClassVar[bool] = False  # the scheduler counts its own queue

    request: Request
    image: ImageInfo | None = None
    image_seconds: float = 0.0
    tokens: list[TokenInfo] = dataclasses.field(default_factory=list)
    num_told: int = 0  # tokens in deltas, of earlier engines too
    refinable: PreparedImage | None = None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PendingRefinement(Stage):
    """A request whose sequence has finished and whose `done` waits for its outline.

    `work` prepares the refinement on a thread; `refinement` then runs on the device; the next
    `work` traces its result.
    """

    done: Done
    outline: Outline
    started: float
    work: Future[Any]
    refinement: Refinement | None = None

    @property
    def futures(self) -> Sequence[Future[Any]]:
        return (self.work,)

    def cancel(self) -> None:
        self.work.cancel()
