"""Cameras that play a clip in real time, while a control loop asks where everything is now.

The path is the product's own: a `Feed`, which opens another session when one is lost. A frame that
is shown late keeps the time at which it was due.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from legato_client import Client, Detection, DetectResult, DetectTask, ImageInput, TrackNow
from legato_client.cli.demo import LocalServer
from legato_client.stream.feed import AnsweredFrame, Feed, FeedSettings
from legato_client.stream.frames import CapturedFrame, FrameCounters

from benchmarks.robot.scene import FPS, NOUNS, Clip

MAX_AGE = 2.0  # seconds; older frames get no answer
_PATIENCE = 120.0  # seconds without a server
SCRIPTED = (
    *("--model", "null", "--null-step-ms", "5"),
    *("--max-running", str(len(NOUNS))),
)
"""Options of a server without a model: about 30 ms for a frame, one frame at a time."""
_MAX_CAMERAS = 8  # the server and they share a machine
_NS = 1_000_000_000

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answered frame of the clip; times are the clip's, in seconds."""

    number: int
    captured: float
    arrived: float
    found: Mapping[str, Sequence[Detection]]  # by noun
    tracks: Sequence[TrackNow]  # predicted for its arrival


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The tracks predicted for the moment at which a frame was taken, known at that moment."""

    number: int
    tracks: Sequence[TrackNow]


@dataclasses.dataclass(frozen=True, slots=True)
class Outage:
    """Moments of a killed server, on the camera's clip: dead, serving again, answering again."""

    killed: float
    serving: float
    answering: float


class ShownCamera:
    """A camera that shows a clip from frame `offset` on, and asks about `rate` frames a second.

    `every` frame is asked about as soon as there is room, without a clock, if the server's
    capacity is to be found.
    """

    def __init__(
        self, client: Client, clip: Clip, rate: float, *, offset: int = 0, every: bool = False
    ) -> None:
        self.answers: list[Answer] = []
        self.looks: list[Look] = []
        self.offered: list[int] = []
        self.counters = FrameCounters(None if every else MAX_AGE)
        self._clip = clip
        self._rate = rate
        self._offset = offset
        self._every = every
        self._begin_ns = time.time_ns()
        tasks = {noun: DetectTask(noun) for noun in NOUNS}
        limit = None if every else MAX_AGE
        self._feed = Feed(
            client,
            FeedSettings(tasks, every=every, max_age=limit, name="camera", track=True),
            self._note,
            self.counters,
            patience=_PATIENCE,
            waits=True,
        )
        self._stopped = threading.Event()
        self._problem: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in (self._feed.run, self._show)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Take no more frames, and wait for the answers. Raises what failed meanwhile."""
        self._stopped.set()
        self._feed.finish()
        for thread in self._threads:
            thread.join()
        if self._problem is not None:
            raise self._problem

    def time(self) -> float:
        """Return the present on the clip."""
        return self._clip_time(time.time_ns())

    def answered_since(self, begin: float) -> float | None:
        """Return when the first answer about a frame taken after `begin` came; None: not yet."""
        later = (each.arrived for each in list(self.answers) if each.captured > begin)
        return min(later, default=None)

    def _clip_time(self, at_ns: int) -> float:
        return self._offset / FPS + (at_ns - self._begin_ns) / _NS

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - `finish` raises it in its thread
            self._problem = error
            self._stopped.set()
            self._feed.stop()

    def _show(self) -> None:
        self._begin_ns = time.time_ns()
        for k in itertools.count():
            due_ns = self._begin_ns + round(k * _NS / FPS)
            if self._every:
                due_ns = time.time_ns()
            if self._stopped.wait(max(due_ns - time.time_ns(), 0) / _NS):
                return
            number = self._offset + k
            self.looks.append(Look(number, self._feed.now(due_ns)))
            if self._every or int(k * self._rate / FPS) > int((k - 1) * self._rate / FPS) or not k:
                self.offered.append(number)
                self._feed.offer(self._captured(number, due_ns))

    def _captured(self, number: int, due_ns: int) -> CapturedFrame:
        def read() -> ImageInput:
            return self._clip.shot(number).image()

        def image() -> Any:
            raise ValueError("nothing is drawn here")

        return CapturedFrame(number, number / FPS, due_ns, read, image)

    def _note(self, answered: AnsweredFrame) -> None:
        arrived_ns = time.time_ns()
        outcomes = answered.outcomes.items()
        found = {n: each.objects for n, each in outcomes if isinstance(each, DetectResult)}
        frame = answered.frame
        arrived = self._clip_time(arrived_ns)
        tracks = self._feed.now(arrived_ns)
        self.answers.append(Answer(frame.number, frame.time, arrived, found, tracks))


# ---------------------------------------------------------------- runs


class MortalServer(LocalServer):
    """A server that can be killed and started again on its port.

    With a clip's `truth`, a file, it answers from that.
    """

    def __init__(self, options: Sequence[str], truth: Path | None = None) -> None:
        super().__init__(options if truth is None else (*SCRIPTED, *options))
        if truth is not None:
            self.program = (sys.executable, "-m", "benchmarks.robot.scripted", str(truth))

    def restart(self) -> None:
        """End its process by SIGKILL, as a crash does, and start another one at once."""
        assert self._process is not None, "killed before it was started"
        self._process.kill()
        self._process.wait()
        self.__enter__()


@contextlib.contextmanager
def playing(
    client: Client, clip: Clip, rate: float, *, every: bool = False
) -> Iterator[list[ShownCamera]]:
    """Play the clip to as many cameras as it takes to offer `rate` frames a second."""
    count = max(-(-round(1000 * rate) // (1000 * FPS)), 1)
    if count > _MAX_CAMERAS:
        raise ValueError(f"{rate:.0f} frames a second take {count} cameras, above {_MAX_CAMERAS}")
    cameras = [
        ShownCamera(client, clip, rate / count, offset=k * len(clip) // count, every=every)
        for k in range(count)
    ]
    for camera in cameras:
        camera.start()
    try:
        yield cameras
    finally:
        with contextlib.ExitStack() as ending:
            for camera in cameras:
                ending.callback(camera.finish)


def play_for(camera: ShownCamera, seconds: float, *, answers: int = 1) -> None:
    """Wait so long, and until the camera has so many answers."""
    time.sleep(seconds)
    _until(lambda: len(camera.answers) >= answers)


def play_with_kills(
    server: MortalServer, camera: ShownCamera, seconds: float, kills: int
) -> list[Outage]:
    """Kill the server `kills` times, each time after answers; return what the camera saw."""
    outages = []
    for _ in range(kills):
        play_for(camera, seconds / (kills + 1))
        killed = camera.time()
        server.restart()
        server.wait_until_serving(_PATIENCE, lambda text: None)
        serving = camera.time()
        answering = _until(functools.partial(camera.answered_since, killed))
        outages.append(Outage(killed, serving, answering))
    play_for(camera, seconds / (kills + 1))
    return outages


def _until(condition: Callable[[], T | None]) -> T:
    """Return what `condition` returns once it is true."""
    end = time.monotonic() + _PATIENCE
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"the cameras had no answer for {_PATIENCE:g} s")
        time.sleep(0.005)
    return value
