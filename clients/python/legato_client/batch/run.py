"""Runs all tasks on every image."""

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
from legato_client.batch.images import BatchImage
from legato_client.batch.output import Line, Output, answered_line, failed_line, unreadable_line

PATIENCE = 600.0
"""Seconds of retries per image while the server is busy."""


class BatchClient:
    """Client that retries while the server is busy; thread-safe, `end` stops the retries."""

    def __init__(self, client: Client, tasks: Sequence[Task], options: Options) -> None:
        self._client = client
        self._tasks = tuple(tasks)
        self._options = options
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()

    def ask(self, image: ImageInput) -> tuple[Result | LegatoError, ...]:
        """Run all tasks on an image, retrying while the server is busy.

        Raises if all tasks failed alike, or on any failure unrelated to the image.
        """
        end = time.monotonic() + PATIENCE
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
            if not is_about_image(error):
                raise error
        if len(errors) == len(outcomes) and len({each.reason for each in errors}) == 1:
            raise errors[0]
        return outcomes


def is_about_image(error: LegatoError) -> bool:
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


def perform(
    client: Client,
    tasks: Mapping[str, Task],
    options: Options,
    output: Output,
    images: Iterable[BatchImage],
    on_image: Callable[[], None],
    *,
    parallel: int,
) -> None:
    """Append the lines of the images that the output lacks, `parallel` at a time.

    An image's own failure becomes its line. A failure unrelated to the image ends the run: images
    in flight still get their lines, the rest is left to a later run. `on_image` is called after
    each image, in any thread.

    Raises:
        LegatoError: a failure unrelated to the image.
        OSError: the output cannot be written, or `images` not read.
    """
    batch_client = BatchClient(client, tuple(tasks.values()), options)

    def process(image: BatchImage) -> None:
        if not batch_client.has_ended:
            output.append(_line(batch_client, tuple(tasks), image))
            on_image()

    pool = futures.ThreadPoolExecutor(parallel, "legato-run")
    running: set[futures.Future[None]] = set()
    try:
        for image in images:
            if image.key in output.done:
                continue
            running.add(pool.submit(process, image))
            if len(running) > parallel:  # keep one image ready for a free thread
                done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                _raise_first(done)
        _raise_first(futures.as_completed(running))
    except KeyboardInterrupt:
        client.close()  # ends the calls
        raise
    finally:
        batch_client.end()
        pool.shutdown(cancel_futures=True)


def _line(client: BatchClient, names: Sequence[str], image: BatchImage) -> Line:
    try:
        data = image.read()
    except (OSError, ValueError) as error:
        return unreadable_line(image, error)
    try:
        outcomes = client.ask(data)
    except LegatoError as error:
        if not is_about_image(error):
            raise
        return failed_line(image, error)
    return answered_line(image, names, outcomes)


def _raise_first(done: Iterable[futures.Future[None]]) -> None:
    for each in done:
        each.result()
