"""Asks all tasks about one picture, for as long as a busy server says when to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from legato_client._client import Client
from legato_client._errors import (
    Aborted,
    Busy,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LegatoError,
    ResourceExhausted,
    Unavailable,
)
from legato_client._images.sources import ImageInput
from legato_client._values.results import Result
from legato_client._values.tasks import Options, Task

PATIENCE = 600.0
"""Seconds for which a picture waits for a server that says when to come back."""


class Asking:
    """Safe to share between threads; `end` lets those that wait for a busy server give up."""

    def __init__(
        self, client: Client, tasks: Sequence[Task], options: Options, patience: float = PATIENCE
    ) -> None:
        self._client = client
        self._tasks = tuple(tasks)
        self._options = options
        self._patience = patience
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()

    def ask(self, image: ImageInput) -> tuple[Result | LegatoError, ...]:
        """Raises what all tasks met, and what is not of the picture if any task met it."""
        end = time.monotonic() + self._patience
        while True:
            try:
                return self._ask_once(image)
            except (Busy, Unavailable) as error:
                delay = error.retry_after
                if delay is None or time.monotonic() + delay > end or self._ended.wait(delay):
                    raise

    def _ask_once(self, image: ImageInput) -> tuple[Result | LegatoError, ...]:
        outcomes = self._client.run_tasks(image, self._tasks, options=self._options)
        errors = [each for each in outcomes if isinstance(each, LegatoError)]
        for error in errors:
            if not is_of_the_picture(error):
                raise error
        if len(errors) == len(outcomes) and len({each.reason for each in errors}) == 1:
            raise errors[0]
        return outcomes


def is_of_the_picture(error: LegatoError) -> bool:
    """Whether another picture might fare better."""
    match error:
        case InvalidArgument():
            fields = (violation.field for violation in error.field_violations)
            return error.reason.startswith("IMAGE_") or any(f.startswith("image") for f in fields)
        case Busy():
            return False
        case Aborted() | DeadlineExceeded() | InternalError() | ResourceExhausted():
            return True
        case _:
            return False
