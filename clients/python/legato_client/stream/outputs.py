"""Outputs of answered frames: JSON lines and annotated video."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from legato_client import draw
from legato_client._types.results import Detection, Mark, TrackNow
from legato_client.batch import output, video
from legato_client.batch.images import BatchImage, Key
from legato_client.stream.feed import AnsweredFrame
from legato_client.stream.frames import CapturedFrame

_MAX_WAITING = 8  # frames; each holds its pixels


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """Frame to draw, its marks, and below them the measured boxes of extrapolated objects."""

    frame: CapturedFrame
    marks: Sequence[Mark]
    faint: Sequence[Mark] = ()


class Drawings:
    """Drawings of answers: on their own frames, or with tracked objects on the newest frame.

    There the boxes are where the objects are expected in it. Thread-safe.
    """

    def __init__(self) -> None:
        self.now: Callable[[int], Sequence[TrackNow]] = lambda at_ns: ()
        """Function that predicts the tracked objects at a capture time."""
        self.newest: CapturedFrame | None = None
        """The frame captured last; None: draw on each answer's own frame."""

    def of(self, answered: AnsweredFrame) -> Drawing:
        found, newest = marks(answered), self.newest
        tracks = self.now(newest.captured_ns) if newest is not None else ()
        if newest is None or not tracks:
            return Drawing(answered.frame, found)
        measured = [each for each in found if isinstance(each, Detection) and each.track_id]
        others = [each for each in found if each not in measured]
        expected = [dataclasses.replace(each.last, box=each.box) for each in tracks]
        return Drawing(newest, (*expected, *others), measured)


class BackgroundWorker:
    """Thread that passes drawings to `work`, so that reading answers continues.

    A full queue drops its oldest frame, counted as `num_dropped`; if `every` frame is required,
    the caller waits. The next call raises an OSError of `work`.
    """

    def __init__(self, work: Callable[[Drawing], None], every: bool) -> None:
        self._work = work
        self._every = every
        self._waiting: queue.Queue[Drawing | None] = queue.Queue(_MAX_WAITING)  # None: the end
        self._problem: OSError | None = None
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="legato-worker", daemon=True)
        self._thread.start()

    def submit(self, drawing: Drawing) -> None:
        self._raise()
        if self._waiting.full() and not self._every:
            with contextlib.suppress(queue.Empty):  # the thread was faster
                self._waiting.get_nowait()
                self.num_dropped += 1
        self._waiting.put(drawing)

    def close(self) -> None:
        """Wait until all frames were processed."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        for drawing in iter(self._waiting.get, None):
            if self._problem is None:  # else only make room, so that no caller waits for ever
                try:
                    self._work(drawing)
                except OSError as error:
                    self._problem = error


# ---------------------------------------------------------------- outputs

SUFFIXES = (".jsonl", ".mp4")
"""Suffixes of output files."""


class Receiver(Protocol):
    """Receiver of answered frames; both methods raise OSError."""

    def take(self, answered: AnsweredFrame) -> None: ...

    def close(self) -> None: ...


class JsonLinesOutput:
    """JSON line for each frame, as `legato run` writes it, with the time and the age.

    Lines are flushed at once, so that a pipe's reader is as up to date as this program.
    """

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file = file
        self._source = source

    def take(self, answered: AnsweredFrame) -> None:
        frame = answered.frame
        image = BatchImage(Key(self._source, frame.number), frame.read, frame.time)
        line = output.answered_line(
            image, list(answered.outcomes), list(answered.outcomes.values())
        )
        results = line.pop("results")
        about = {"captured": frame.captured_ns / 1e9, "age": round(answered.age, 4)}
        self._file.write(output.encode({**line, **about, "results": results}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class VideoOutput:
    """MP4 file of an answer's drawing for each answer, shown until the next.

    If drawing is slower than the answers, frames are dropped, unless `every` one is required.
    """

    def __init__(self, path: Path, every: bool, drawings: Drawings) -> None:
        self._drawings = drawings
        self._writer = video.VideoWriter(path).__enter__()
        self._last = -1.0
        self._worker = BackgroundWorker(self._draw, every)

    def take(self, answered: AnsweredFrame) -> None:
        self._worker.submit(self._drawings.of(answered))

    def close(self) -> None:
        try:
            self._worker.close()
        finally:
            self._writer.__exit__(None, None, None)

    @property
    def num_dropped(self) -> int:
        return self._worker.num_dropped

    def _draw(self, drawing: Drawing) -> None:
        frame = drawing.frame
        if frame.time <= self._last:
            return  # answers of two sessions may cross
        try:
            drawn = draw.annotate(frame.image(), drawing.marks, faint=drawing.faint)
        except ValueError:
            return  # an undecodable image: the server has already reported it
        self._writer.write(drawn, frame.time)
        self._last = frame.time


def open_output(
    name: str,
    source: str,
    every: bool,
    standard_output: Callable[[], IO[bytes]],
    drawings: Drawings,
) -> Receiver:
    """Open an output. Raises OSError, and ValueError for an unknown ending."""
    if name == "-":
        return JsonLinesOutput(standard_output(), source)
    path = Path(name)
    if path.suffix.lower() == ".mp4":
        return VideoOutput(path, every, drawings)
    if path.suffix.lower() == ".jsonl":
        return JsonLinesOutput(path.open("wb"), source)
    raise ValueError(f"an output is -, or a file that ends in {' or '.join(SUFFIXES)}: {name!r}")


def marks(answered: AnsweredFrame) -> list[Mark]:
    return [*itertools.chain.from_iterable(map(draw.marks_of, answered.outcomes.values()))]
