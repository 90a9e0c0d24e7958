"""Conversion of frames and tasks to engine requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato.v1 import session_pb2 as pb
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.core.task_specs import TaskSpec
from legato_engine.errors import InvalidField, LegatoError, QuotaExceeded, SessionProtocol
from legato_engine.ipc.messages import ModelInfo

from legato_service.convert import fields, requests
from legato_service.requests.dispatcher import Dispatcher
from legato_service.rpc import call, limits
from legato_service.session.capture_clock import CaptureClock
from legato_service.session.frame import Frame
from legato_service.session.frame_tracks import FrameTracks
from legato_service.tracking.tracker import Tracker

_TASK = limits.kind_of(task_pb2.Task.DESCRIPTOR)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task's request without an id, or the task's error; `tracker` follows its objects."""

    task_id: str
    request: Request | LegatoError
    tracker: Tracker | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class FrameRequest(Frame):
    """A frame with all that is needed to run it.

    `captured_time` is in seconds, on the clock of the stamps that have a time.
    """

    captured_time: float
    stamp: media_pb2.FrameStamp
    image: media_pb2.Image | None  # None once it was read
    tasks: tuple[PlannedTask, ...]


class FramePlanner:
    """Converts the frames of one session.

    Raises:
        LegatoError: the opening's model, adapter or tasks cannot be served.
    """

    def __init__(self, dispatcher: Dispatcher, opening: pb.SessionOpen, max_age: float) -> None:
        self._dispatcher = dispatcher
        self._options = inference_pb2.RequestOptions(model=opening.model, adapter=opening.adapter)
        self._deltas = opening.stream_deltas
        self._clock = CaptureClock(max_age)
        self._tracks = FrameTracks()
        self.model: ModelInfo = dispatcher.model(opening.model, opening.adapter)
        self._standing_tasks = self._checked(opening.standing_tasks, "open.standing_tasks")

    def update(self, messages: Sequence[task_pb2.Task]) -> None:
        """Replace the standing tasks.

        Raises:
            LegatoError: a task is malformed or cannot be served.
        """
        self._standing_tasks = self._checked(messages, "update.standing_tasks")

    def plan(self, message: pb.Frame, now: float, wall_clock: float) -> FrameRequest:
        """Convert a frame that arrived at `now` (`time.monotonic`) and `wall_clock`.

        Raises:
            SessionProtocol: the frame has no stamp.
        """
        if not message.HasField("stamp"):
            raise SessionProtocol("a frame needs its stamp", field="frame.stamp")
        stamp, age = message.stamp, 0.0
        if stamp.HasField("capture_time"):
            captured_time = fields.seconds(stamp.capture_time)
            age = self._clock.age(captured_time, wall_clock)
        else:
            captured_time = self._clock.captured(wall_clock)
        tasks = self._tasks(message)
        image: media_pb2.Image | None = message.image
        if (refused := _over_quota()) is not None:
            tasks, image = tuple(PlannedTask(task.task_id, refused) for task in tasks), None
        return FrameRequest(
            sequence=stamp.sequence,
            task_ids=tuple(task.task_id for task in tasks),
            captured_at=now - age,
            captured_time=captured_time,
            must_run=message.must_run,
            stamp=stamp,
            image=image,
            tasks=tasks,
        )

    def _tasks(self, message: pb.Frame) -> tuple[PlannedTask, ...]:
        """An invalid list becomes one failed task without an id."""
        standing = () if message.skip_standing_tasks else self._standing_tasks
        extra = tuple(
            self._planned(each, f"frame.extra_tasks[{index}]")
            for index, each in enumerate(message.extra_tasks[: requests.MAX_TASKS + 1])
        )
        tasks = (*standing, *extra)
        ids = [task.task_id for task in tasks if task.task_id]
        limit = requests.MAX_TASKS
        if not 1 <= len(tasks) <= limit:
            error = InvalidField(
                f"a frame has 1 to {limit} tasks", field="frame", limit=limit, actual=len(tasks)
            )
        elif len(ids) != len(set(ids)):
            error = InvalidField("the ids of a frame's tasks must differ", field="frame")
        else:
            return tasks
        return (PlannedTask("", error),)

    def _checked(self, messages: Sequence[task_pb2.Task], field: str) -> tuple[PlannedTask, ...]:
        tasks = requests.tasks(messages, field, least=0, standing=True)
        requested = [
            self._request(task, message, f"{field}[{index}].")
            for index, (task, message) in enumerate(zip(tasks, messages, strict=True))
        ]
        trackers = self._tracks.replace(messages)
        return tuple(
            PlannedTask(message.task_id, request, tracker)
            for message, request, tracker in zip(messages, requested, trackers, strict=True)
        )

    def _planned(self, message: task_pb2.Task, path: str) -> PlannedTask:
        try:
            _TASK.check(message.SerializeToString(), f"{path}.")
            task = requests.task(message, path)
            return PlannedTask(message.task_id, self._request(task, message, f"{path}."))
        except LegatoError as error:
            return PlannedTask(message.task_id[: requests.MAX_TASK_ID], error)

    def _request(self, task: TaskSpec, message: task_pb2.Task, path: str) -> Request:
        """The image is cached, so that it is encoded once a frame."""
        sampling = requests.sampling(message.sampling, path)
        request = requests.request(
            RequestKey(""), task, sampling, self._options, deltas=self._deltas
        )
        self._dispatcher.check(request, path)
        return msgspec.structs.replace(request, cache_image=True)


def _over_quota() -> QuotaExceeded | None:
    """Count a frame as a request of the session's credential."""
    principal = call.current().principal
    try:
        if principal is not None:
            principal.take_request()
    except QuotaExceeded as error:
        return error
    return None
