"""A clip played through a session as a camera would: on time, whatever the server does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

from legato_client import (
    AsyncClient,
    AsyncSession,
    DetectResult,
    DetectTask,
    FrameDropped,
    FrameResult,
    FrameStamp,
    GoAway,
    LegatoError,
    Tracking,
    TrackNow,
)

from examples.robot.recording import Answer, Drop, Look, Recording, Sent

CAMERA = "camera"  # the frame_id of the stamps
_PATIENCE = 60.0  # seconds after the last frame within which the server must have said everything
_NS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Clip:
    """Image files, one every 1 / `fps` seconds."""

    files: Sequence[bytes]
    fps: float

    @property
    def seconds(self) -> float:
        """How long it plays."""
        return len(self.files) / self.fps


@dataclasses.dataclass(frozen=True)
class Start:
    """One moment on two clocks: ages are told by the monotonic one, stamps by the wall's."""

    monotonic: float
    wall_ns: int

    @classmethod
    def now(cls) -> Start:
        return cls(time.monotonic(), time.time_ns())

    def elapsed(self) -> float:
        """Seconds since."""
        return time.monotonic() - self.monotonic

    def at_ns(self, elapsed: float) -> int:
        """Return a moment `elapsed` seconds after the start, on the clock of the stamps."""
        return self.wall_ns + round(elapsed * _NS)

    def stamp(self, sequence: int, captured: float) -> FrameStamp:
        """Stamp an image taken `captured` seconds after the start."""
        return FrameStamp(CAMERA, self.at_ns(captured), sequence)


async def play(
    client: AsyncClient,
    clip: Clip,
    nouns: tuple[str, ...],
    max_frame_age: float,
    *,
    max_in_flight: int = 0,
    max_objects: int | None = None,
) -> Recording:
    """Send every image at its time, and record what comes back until the session ends.

    Frame k is taken k / fps seconds after the start, and its stamp and its age count from then,
    also when it is sent late. The newest frame wins; one older than `max_frame_age` seconds is
    dropped by the server, and one for which it grants no credit is left out here. As often as there
    are frames the session is asked where the objects are now. LegatoError if the session does not
    open; how it failed later is in `Recording.failure`.
    """
    tasks = [
        DetectTask(noun, max_objects=max_objects, task_id=noun, tracking=Tracking())
        for noun in nouns
    ]
    recording = Recording(nouns, len(clip.files))
    async with client.session(
        tasks,
        policy="latest_wins",
        max_frame_age=max_frame_age,
        max_in_flight=max_in_flight,
        when_full="drop",
        name="robot",
    ) as session:
        start = Start.now()
        try:
            async with asyncio.timeout(clip.seconds + _PATIENCE), asyncio.TaskGroup() as both:
                both.create_task(_read(session, start, recording))
                both.create_task(_write(session, start, clip, recording))
                both.create_task(_look(session, start, clip, recording))
        except* (LegatoError, TimeoutError) as failures:
            recording.failure = repr(failures.exceptions[0])
    return recording


async def _write(session: AsyncSession, start: Start, clip: Clip, recording: Recording) -> None:
    """Send frames in an open loop: the clock alone says when the next one goes."""
    with contextlib.suppress(LegatoError):  # the session has ended; the reader tells why
        async for sequence, captured in _ticks(start, clip):
            stamp, now = start.stamp(sequence, captured), start.elapsed()
            if await session.send(clip.files[sequence - 1], stamp=stamp) is None:
                recording.left_out.append(sequence)
            else:
                recording.sent.append(Sent(sequence, captured, now))
        await session.finish()


async def _look(session: AsyncSession, start: Start, clip: Clip, recording: Recording) -> None:
    """Ask where things are at the camera's rate, as a robot's control loop does."""
    async for _ in _ticks(start, clip):
        now = start.elapsed()
        recording.looks.append(Look(now, session.now(start.at_ns(now))))


async def _ticks(start: Start, clip: Clip) -> AsyncIterator[tuple[int, float]]:
    """Each frame's sequence, from 1, and when it is taken, no sooner than then."""
    for k in range(len(clip.files)):
        captured = k / clip.fps
        await asyncio.sleep(captured - start.elapsed())
        yield k + 1, captured


async def _read(session: AsyncSession, start: Start, recording: Recording) -> None:
    """Note everything the server says, until it has said all."""
    async for answer in session:
        arrived = start.elapsed()
        match answer:
            case FrameResult():
                tracks = session.now(start.at_ns(arrived))
                recording.answers.append(_answer(answer, arrived, tracks))
            case FrameDropped(sequence, reason, total):
                recording.drops.append(Drop(sequence, reason, arrived, total))
            case GoAway():
                recording.failure = f"the server ended the session: {answer.reason}"


def _answer(answer: FrameResult, arrived: float, tracks: Sequence[TrackNow]) -> Answer:
    outcome = answer.outcome
    found = outcome.objects if isinstance(outcome, DetectResult) else ()
    return Answer(
        sequence=answer.sequence,
        noun=answer.task_id,
        boxes=tuple(one.box for one in found),
        arrived=arrived,
        is_last=answer.last_for_frame,
        error=str(outcome) if isinstance(outcome, LegatoError) else "",
        track_ids=tuple(one.track_id for one in found),
        tracks=tuple(track for track in tracks if track.task_id == answer.task_id),
        told_age=answer.age,
    )
