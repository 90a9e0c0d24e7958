"""Asks about every picture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures

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
from legato_client.batch import lines
from legato_client.batch.output import Output
from legato_client.batch.sources import Picture

PATIENCE = 600.0
"""Seconds for which a picture waits for a server that says when to come back."""


class Run:
    """Asks about pictures, `parallel` at a time, and appends their lines to `output`.

    What is wrong with a picture is its line. What any other picture would meet too ends the run:
    those that were asked by then still get their lines, the rest is left to a later run.
    """

    def __init__(
        self,
        client: Client,
        tasks: Mapping[str, Task],
        options: Options,
        output: Output,
        *,
        parallel: int,
        patience: float = PATIENCE,
    ) -> None:
        self._client = client
        self._names = tuple(tasks)
        self._tasks = tuple(tasks.values())
        self._options = options
        self._output = output
        self._parallel = parallel
        self._patience = patience
        self._ended = threading.Event()

    def perform(self, pictures: Iterable[Picture], tell: Callable[[], None]) -> None:
        """Ask about those that the output lacks; `tell` is called after each, by any thread.

        Raises:
            LegatoError: the server refuses, whatever the picture.
            OSError: the output cannot be written, or `pictures` not read.
        """
        pool = futures.ThreadPoolExecutor(self._parallel, "legato-run")
        running: set[futures.Future[None]] = set()
        try:
            for picture in pictures:
                if picture.key in self._output.done:
                    continue
                running.add(pool.submit(self._ask_and_tell, picture, tell))
                if len(running) > self._parallel:  # one is ready when a thread is
                    done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                    _raise_first(done)
            _raise_first(futures.as_completed(running))
        except KeyboardInterrupt:
            self._client.close()  # ends the calls
            raise
        finally:
            self._ended.set()
            pool.shutdown(cancel_futures=True)

    def _ask_and_tell(self, picture: Picture, tell: Callable[[], None]) -> None:
        if not self._ended.is_set():
            self._output.append(self._line(picture))
            tell()

    def _line(self, picture: Picture) -> lines.Line:
        try:
            image = picture.read()
        except (OSError, ValueError) as error:
            return lines.unreadable(picture, error)
        try:
            outcomes = self._ask(image)
        except LegatoError as error:
            if not _is_of_the_picture(error):
                raise
            return lines.failed(picture, error)
        return lines.answered(picture, self._names, outcomes)

    def _ask(self, image: ImageInput) -> tuple[Result | LegatoError, ...]:
        """Come again for as long as the server says when."""
        end = time.monotonic() + self._patience
        while True:
            try:
                return self._ask_once(image)
            except (Busy, Unavailable) as error:
                delay = error.retry_after
                if delay is None or time.monotonic() + delay > end or self._ended.wait(delay):
                    raise

    def _ask_once(self, image: ImageInput) -> tuple[Result | LegatoError, ...]:
        """Raises what all tasks met, and what is not of the picture if any task met it."""
        outcomes = self._client.run_tasks(image, self._tasks, options=self._options)
        errors = [each for each in outcomes if isinstance(each, LegatoError)]
        for error in errors:
            if not _is_of_the_picture(error):
                raise error
        if len(errors) == len(outcomes) and len({each.reason for each in errors}) == 1:
            raise errors[0]
        return outcomes


def _raise_first(done: Iterable[futures.Future[None]]) -> None:
    for each in done:
        each.result()


def _is_of_the_picture(error: LegatoError) -> bool:
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
