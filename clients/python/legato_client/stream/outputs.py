"""Outputs of answered frames: JSON lines and annotated video."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from legato_client import draw
from legato_client._errors import LegatoError
from legato_client._types.results import Mark
from legato_client.batch import output, video
from legato_client.batch.images import Key, Picture
from legato_client.stream.feed import Answered

_WAITING = 8  # pictures; each holds its pixels


class Aside:
    """Hands pictures to `take` in a thread of its own, so that reading answers goes on.

    Of more than can wait the oldest are left out, and counted as `left_out`; where `every` one is
    to be taken, the caller waits. An OSError of `take` is raised by the next call.
    """

    def __init__(self, take: Callable[[Answered], None], every: bool) -> None:
        self._take = take
        self._every = every
        self._changed = threading.Condition()  # guards the rest
        self._waiting: collections.deque[Answered] = collections.deque()
        self._closed = False
        self._problem: OSError | None = None
        self.left_out = 0
        self._thread = threading.Thread(target=self._run, name="legato-aside", daemon=True)
        self._thread.start()

    def put(self, answered: Answered) -> None:
        with self._changed:
            if self._every:
                self._changed.wait_for(lambda: len(self._waiting) < _WAITING or self._problem)
            elif len(self._waiting) == _WAITING:
                self._waiting.popleft()
                self.left_out += 1
            self._raise()
            self._waiting.append(answered)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all have been taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        while (answered := self._next()) is not None:
            try:
                self._take(answered)
            except OSError as error:
                with self._changed:
                    self._problem = error
                    self._changed.notify_all()
                return

    def _next(self) -> Answered | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            answered = self._waiting.popleft()
            self._changed.notify_all()
            return answered


# ---------------------------------------------------------------- outputs

# Where answered pictures go: lines of JSON, a video of drawings.

MARKED = (".jsonl", ".mp4")
"""Endings of the names of outputs."""


class Receiver(Protocol):
    """Takes answered pictures; both methods raise OSError."""

    def take(self, answered: Answered) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line for each picture, as `legato run` writes them, with the time and the age.

    Each is passed on at once, so that a reader at a pipe's end is as up to date as this program.
    """

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file = file
        self._source = source

    def take(self, answered: Answered) -> None:
        shot = answered.shot
        picture = Picture(Key(self._source, shot.number), shot.read, shot.time)
        line = output.answered(picture, list(answered.outcomes), list(answered.outcomes.values()))
        results = line.pop("results")
        about = {"captured": shot.captured_ns / 1e9, "age": round(answered.age, 4)}
        self._file.write(output.encode({**line, **about, "results": results}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Film:
    """An MP4 file of the answered pictures with their own marks, each shown until the next.

    The picture that a mark is drawn on is the one that it was found in, however late. Where
    drawing is slower than the answers some are `left_out`, unless `every` one is to be drawn.
    """

    def __init__(self, path: Path, every: bool) -> None:
        self._writer = video.VideoWriter(path).__enter__()
        self._last = -1.0
        self._aside = Aside(self._draw, every)

    def take(self, answered: Answered) -> None:
        self._aside.put(answered)

    def close(self) -> None:
        try:
            self._aside.close()
        finally:
            self._writer.__exit__(None, None, None)

    @property
    def left_out(self) -> int:
        return self._aside.left_out

    def _draw(self, answered: Answered) -> None:
        if answered.shot.time <= self._last:
            return  # answers of two sessions may cross
        try:
            drawn = draw.annotate(answered.shot.picture(), marks(answered))
        except ValueError:
            return  # it was sent as it is, and the server said what is wrong
        self._writer.write(drawn, answered.shot.time)
        self._last = answered.shot.time


def opened(
    name: str, source: str, every: bool, standard_output: Callable[[], IO[bytes]]
) -> Receiver:
    """Raises OSError, and ValueError for a name of another ending."""
    if name == "-":
        return Lines(standard_output(), source)
    path = Path(name)
    if path.suffix.lower() == ".mp4":
        return Film(path, every)
    if path.suffix.lower() == ".jsonl":
        return Lines(path.open("wb"), source)
    raise ValueError(f"an output is -, or a file that ends in {' or '.join(MARKED)}: {name!r}")


def marks(answered: Answered) -> list[Mark]:
    found: list[Mark] = []
    for outcome in answered.outcomes.values():
        if not isinstance(outcome, LegatoError):
            found += outcome.marks
    return found
