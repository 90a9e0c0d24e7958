"""Asks all tasks about every image."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from legato_client._types.results import Result
from legato_client._types.tasks import Options, Task
from legato_client.batch import output as lines
from legato_client.batch.images import Picture
from legato_client.batch.output import Output

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
    """Return whether the failure concerns this image only."""
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


# ---------------------------------------------------------------- run

# Asks about every picture.


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
        self._asking = Asking(client, tuple(tasks.values()), options, patience)
        self._output = output
        self._parallel = parallel

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
            self._asking.end()
            pool.shutdown(cancel_futures=True)

    def _ask_and_tell(self, picture: Picture, tell: Callable[[], None]) -> None:
        if not self._asking.has_ended:
            self._output.append(self._line(picture))
            tell()

    def _line(self, picture: Picture) -> lines.Line:
        try:
            image = picture.read()
        except (OSError, ValueError) as error:
            return lines.unreadable(picture, error)
        try:
            outcomes = self._asking.ask(image)
        except LegatoError as error:
            if not is_of_the_picture(error):
                raise
            return lines.failed(picture, error)
        return lines.answered(picture, self._names, outcomes)


def _raise_first(done: Iterable[futures.Future[None]]) -> None:
    for each in done:
        each.result()
