"""A request on its way to the scheduler, while threads prepare what it needs."""

from __future__ import annotations

import concurrent.futures
import dataclasses

from legato_engine.core import Request
from legato_engine.engine.preprocessor import Picture
from legato_engine.models.capabilities import Adapter
from legato_engine.tasks import Task

Preparation = concurrent.futures.Future[Picture] | concurrent.futures.Future[Adapter]


@dataclasses.dataclass(slots=True, eq=False)
class PendingRequest:
    """A request whose picture is being prepared, or its adapter, or both."""

    request: Request
    arrival: float
    task: Task
    picture: Picture | concurrent.futures.Future[Picture] | None
    adapter: concurrent.futures.Future[Adapter] | None

    @property
    def futures(self) -> list[Preparation]:
        """What is waited for."""
        parts = (self.picture, self.adapter)
        return [part for part in parts if isinstance(part, concurrent.futures.Future)]

    @property
    def done(self) -> bool:
        """Whether nothing is waited for any more."""
        return all(future.done() for future in self.futures)

    @property
    def failure(self) -> BaseException | None:
        """What already failed of it."""
        failures = (future.exception() for future in self.futures if future.done())
        return next((failure for failure in failures if failure is not None), None)

    @property
    def prepared_picture(self) -> Picture | None:
        """Its picture, once it is done."""
        if isinstance(self.picture, concurrent.futures.Future):
            return self.picture.result()
        return self.picture

    @property
    def prepared_adapter(self) -> Adapter | None:
        """Its adapter, once it is done."""
        return None if self.adapter is None else self.adapter.result()

    def cancel(self) -> None:
        """Prepare the picture no longer; the adapter may be others' too."""
        if isinstance(self.picture, concurrent.futures.Future):
            self.picture.cancel()
