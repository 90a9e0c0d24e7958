"""Where answered pictures go: lines of JSON, a video of drawings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from legato_client import draw
from legato_client._errors import LegatoError
from legato_client._values.results import Mark
from legato_client.batch import lines, video
from legato_client.batch.sources import Key, Picture
from legato_client.live.aside import Aside
from legato_client.live.lane import Answered

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
        line = lines.answered(picture, list(answered.outcomes), list(answered.outcomes.values()))
        results = line.pop("results")
        about = {"captured": shot.captured_ns / 1e9, "age": round(answered.age, 4)}
        self._file.write(lines.encode({**line, **about, "results": results}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Film:
    """An MP4 file of the answered pictures with their own marks, each shown until the next.

    The picture that a mark is drawn on is the one that it was found in, however late. Where
    drawing is slower than the answers some are `left_out`, unless `every` one is to be drawn.
    """

    def __init__(self, path: Path, every: bool) -> None:
        self._writer = video.Writer(path).__enter__()
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
