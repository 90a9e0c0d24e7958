"""A session service without a model: it answers with the truth, or does what a test tells it to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from legato.v1 import geometry_pb2, session_pb2, session_pb2_grpc
from legato_client import Box

from examples.robot.scene import Scene

EVERY_THIRD = 3
_STEP = 0.2  # seconds; places are whole pixels, so a shorter one says little of the velocity


class FakeSession(session_pb2_grpc.SessionServiceServicer):
    """Answers each third frame truly and drops the others, at once, by the contract's book-keeping.

    `twist` may change a message on its way out, or leave it out by giving None.
    """

    def __init__(
        self,
        scene: Scene,
        fps: float,
        twist: Callable[[session_pb2.SessionResponse], session_pb2.SessionResponse | None],
    ) -> None:
        self._scene = scene
        self._fps = fps
        self._twist = twist
        self.opened: session_pb2.SessionOpen | None = None
        self.credits = 100
        self.frames: list[session_pb2.Frame] = []
        self.end = grpc.StatusCode.OK
        self.end_after: int | None = None

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """Speak the session's grammar."""
        index = 0
        async for request in request_iterator:
            for response in self._replies(request):
                response.index = index
                index += 1
                if (told := self._twist(response)) is not None:
                    yield told
            if len(self.frames) == self.end_after:
                break
        if self.end is not grpc.StatusCode.OK:
            await context.abort(self.end, "as the test wants it")

    def _replies(self, request: session_pb2.SessionRequest) -> list[session_pb2.SessionResponse]:
        if request.WhichOneof("message") == "grant":
            return []
        if request.WhichOneof("message") == "open":
            self.opened = request.open
            opened = session_pb2.SessionOpened(session_id="s", frame_credits=self.credits)
            return [session_pb2.SessionResponse(opened=opened)]
        self.frames.append(request.frame)
        if len(self.frames) % EVERY_THIRD == 0:
            return self._results(request.frame)
        dropped = session_pb2.FrameDropped(
            sequence=request.frame.stamp.sequence,
            reason=session_pb2.DROP_REASON_SUPERSEDED,
            frame_credits=self.credits,
            dropped_total=len(self.frames) - len(self.frames) // EVERY_THIRD,
        )
        return [session_pb2.SessionResponse(dropped=dropped)]

    def _results(self, frame: session_pb2.Frame) -> list[session_pb2.SessionResponse]:
        assert self.opened is not None
        captured = (frame.stamp.sequence - 1) / self._fps
        truth, soon = self._scene.truth(captured), self._scene.truth(captured + _STEP)
        accepted = session_pb2.FrameAccepted(
            sequence=frame.stamp.sequence, frame_credits=self.credits
        )
        replies = [session_pb2.SessionResponse(accepted=accepted)]
        for task in self.opened.standing_tasks:
            reply = session_pb2.SessionResponse()
            reply.result.stamp.CopyFrom(frame.stamp)
            reply.result.result.task_id = task.task_id
            reply.result.age.FromMilliseconds(7)
            box = truth[task.detect.object]
            found = reply.result.result.detect.objects.add(label=task.detect.object)
            found.box.x_min, found.box.y_min = box.x_min, box.y_min
            found.box.x_max, found.box.y_max = box.x_max, box.y_max
            _fill_motion(found, box, soon[task.detect.object])
            replies.append(reply)
        replies[-1].result.last_for_frame = True
        return replies


def _fill_motion(found: geometry_pb2.DetectedObject, box: Box, soon: Box) -> None:
    """A track for each object, at the true place with the true velocity."""
    found.track_id = f"{found.label}-1"
    now, then = _axes(box), _axes(soon)
    for message, axes in (
        (found.motion.position, now),
        (found.motion.velocity, [(b - a) / _STEP for a, b in zip(now, then, strict=True)]),
        (found.motion.position_deviation, [0.01] * 4),
        (found.motion.velocity_deviation, [0.1] * 4),
    ):
        message.center_x, message.center_y, message.width, message.height = axes


def _axes(box: Box) -> list[float]:
    width, height = box.x_max - box.x_min, box.y_max - box.y_min
    return [box.x_min + width / 2, box.y_min + height / 2, width, height]


@contextlib.asynccontextmanager
async def serving(session: FakeSession) -> AsyncIterator[str]:
    """The address of a server of it, for the length of the block."""
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(session, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)
