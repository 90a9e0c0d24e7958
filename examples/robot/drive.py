"""A clip played through a session as a camera would: on time, whatever the server does."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from legato.v1 import media_pb2, session_pb2, session_pb2_grpc, task_pb2
from legato_client import Box

from examples.robot.recording import Answer, Drop, Recording, Sent

CAMERA = "camera"  # the frame_id of the stamps
_PATIENCE = 60.0  # seconds after the last frame within which the server must have said everything
_NS = 1_000_000_000


class SessionBroken(Exception):
    """The server did not do what a session promises, and nothing can be measured."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Picture files, one every 1 / `fps` seconds."""

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
        """This moment."""
        return cls(time.monotonic(), time.time_ns())

    def elapsed(self) -> float:
        """Seconds since."""
        return time.monotonic() - self.monotonic

    def stamp(self, sequence: int, captured: float) -> media_pb2.FrameStamp:
        """The stamp of a picture taken `captured` seconds after."""
        taken = Timestamp()
        taken.FromNanoseconds(self.wall_ns + round(captured * _NS))
        return media_pb2.FrameStamp(frame_id=CAMERA, capture_time=taken, sequence=sequence)


async def play(
    channel: grpc.aio.Channel, clip: Clip, nouns: tuple[str, ...], max_frame_age: float
) -> Recording:
    """Send every picture at its time, and record what comes back until the session ends.

    Frame k is taken k / fps seconds after the start, and its stamp and its age count from then,
    also when it is sent late. The newest frame wins; one older than `max_frame_age` seconds is
    dropped. grpc.RpcError if the session fails, SessionBroken if it does not open.
    """
    stub: Any = session_pb2_grpc.SessionServiceStub(channel)
    call = stub.Session(timeout=clip.seconds + _PATIENCE)
    recording = Recording(nouns)
    try:
        await call.write(session_pb2.SessionRequest(open=_terms(nouns, max_frame_age)))
        first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "opened":
            raise SessionBroken("the session's first message is not `opened`")
        recording.indices.append(first.index)
        start = Start.now()
        # Reader and writer are apart, or full buffers both ways would wait for each other.
        async with asyncio.TaskGroup() as both:
            both.create_task(_read(call, start, recording))
            both.create_task(_write(call, start, clip, recording))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        call.cancel()
    return recording


def _terms(nouns: tuple[str, ...], max_frame_age: float) -> session_pb2.SessionOpen:
    tasks = [task_pb2.Task(task_id=n, detect=task_pb2.DetectTask(object=n)) for n in nouns]
    age = Duration()
    age.FromNanoseconds(round(max_frame_age * _NS))
    return session_pb2.SessionOpen(
        session_name="robot",
        standing_tasks=tasks,
        frame_policy=session_pb2.FRAME_POLICY_LATEST_WINS,
        max_frame_age=age,
    )


async def _write(call: Any, start: Start, clip: Clip, recording: Recording) -> None:
    """An open loop: the clock alone says when the next frame goes."""
    try:
        async for sequence, captured in _ticks(start, clip):
            # Noted before it is sent: its answer may be there before `write` returns.
            recording.sent.append(Sent(sequence, captured, start.elapsed()))
            await call.write(_frame(start, sequence, captured, clip.files[sequence - 1]))
        await call.done_writing()
    except asyncio.InvalidStateError:
        return  # the server has ended the session; the reader tells why


async def _ticks(start: Start, clip: Clip) -> AsyncIterator[tuple[int, float]]:
    """Each frame's sequence, from 1, and when it is taken, no sooner than then."""
    for k in range(len(clip.files)):
        captured = k / clip.fps
        await asyncio.sleep(captured - start.elapsed())
        yield k + 1, captured


def _frame(start: Start, sequence: int, captured: float, file: bytes) -> session_pb2.SessionRequest:
    request = session_pb2.SessionRequest()
    request.frame.stamp.CopyFrom(start.stamp(sequence, captured))
    request.frame.image.encoded.data = file
    return request


async def _read(call: Any, start: Start, recording: Recording) -> None:
    """Note everything the server says, until it has said all."""
    while (response := await call.read()) is not grpc.aio.EOF:  # raises what is not OK
        arrived = start.elapsed()
        recording.indices.append(response.index)
        match response.WhichOneof("message"):
            case "result":
                recording.answers.append(_answer(response.result, arrived))
            case "dropped":
                recording.drops.append(_drop(response.dropped, arrived))
            case _:
                pass  # credits, heartbeats and what is newer than this program


def _answer(result: session_pb2.FrameResult, arrived: float) -> Answer:
    task = result.result
    return Answer(
        sequence=result.stamp.sequence,
        noun=task.task_id,
        boxes=tuple(
            Box(found.box.x_min, found.box.y_min, found.box.x_max, found.box.y_max)
            for found in task.detect.objects
        ),
        arrived=arrived,
        is_last=result.last_for_frame,
        error=task.error.message if task.WhichOneof("result") == "error" else "",
    )


def _drop(dropped: session_pb2.FrameDropped, arrived: float) -> Drop:
    reason = session_pb2.DropReason.Name(dropped.reason).removeprefix("DROP_REASON_")
    return Drop(dropped.sequence, reason.lower(), arrived, dropped.dropped_total)
