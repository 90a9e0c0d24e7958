"""Frames of a session: planning, tracks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import structlog
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, task_pb2
from legato.v1 import session_pb2 as pb
from legato_engine.errors import (
    InvalidField,
    LegatoError,
    QuotaExceeded,
    SessionOutOfOrder,
)
from legato_engine.ipc.messages import ServedModel
from legato_engine.types import Request, RequestKey, TaskSpec

from legato_service.convert import requests, skills
from legato_service.requests.dispatcher import Dispatcher
from legato_service.rpc import call, limits
from legato_service.session.core import CaptureClock, Frame
from legato_service.tracking import Array, Tracked, Tracker, TrackIds

log = structlog.get_logger("legato.session")

MAX_TRACKS = 512  # alive in a session; about 4 KiB each


class FrameTracks:
    """The trackers of the standing tasks."""

    def __init__(self) -> None:
        self._ids = TrackIds(MAX_TRACKS)
        self._trackers: list[tuple[tuple[str, str], Tracker]] = []  # by task id and object

    def replace(self, messages: Sequence[task_pb2.Task]) -> list[Tracker | None]:
        """Return the trackers of new standing tasks; a kept task keeps its tracker."""
        old, self._trackers = self._trackers, []
        trackers = [
            self._tracker(message, old) if message.detect.HasField("tracking") else None
            for message in messages
        ]
        for _, tracker in old:
            tracker.close()
        return trackers

    def _tracker(
        self, message: task_pb2.Task, old: list[tuple[tuple[str, str], Tracker]]
    ) -> Tracker:
        """Return the task's tracker, taken from `old` if the task was there before."""
        key = (message.task_id, message.detect.object)
        max_unseen = requests.tracking(message.detect.tracking)
        index = next((i for i, (each, _) in enumerate(old) if each == key), None)
        tracker = Tracker(self._ids, max_unseen) if index is None else old.pop(index)[1]
        tracker.max_unseen = max_unseen
        self._trackers.append((key, tracker))
        return tracker


def fill_tracks(
    objects: Sequence[geometry_pb2.DetectedObject], tracker: Tracker, sequence: int, time: float
) -> None:
    """Follow the objects of a frame that was captured at `time`, and say so in them."""
    boxes_DA = np.array([_axes_of(each.box) for each in objects]).reshape(-1, 4)
    for message, tracked in zip(objects, tracker.observe(sequence, time, boxes_DA), strict=True):
        if tracked is not None:
            _fill(message, tracked)


def _fill(message: geometry_pb2.DetectedObject, tracked: Tracked) -> None:
    message.track_id = tracked.track_id
    mean_AK, deviation_AK = tracked.state.mean_AK, tracked.state.deviations()
    motion = message.motion
    _fill_axes(motion.position, mean_AK[:, 0])
    _fill_axes(motion.velocity, mean_AK[:, 1])
    _fill_axes(motion.acceleration, mean_AK[:, 2])
    _fill_axes(motion.position_deviation, deviation_AK[:, 0])
    _fill_axes(motion.velocity_deviation, deviation_AK[:, 1])
    _fill_axes(motion.acceleration_deviation, deviation_AK[:, 2])


def _fill_axes(message: geometry_pb2.BoxAxes, values_A: Array) -> None:
    message.center_x, message.center_y, message.width, message.height = values_A.tolist()


def _axes_of(box: geometry_pb2.Box) -> tuple[float, float, float, float]:
    """Return centre x, centre y, width and height."""
    width, height = box.x_max - box.x_min, box.y_max - box.y_min
    return box.x_min + width / 2, box.y_min + height / 2, width, height


# ---------------------------------------------------------------- frame planner

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
    """Converter of one session's frames to engine requests.

    Raises:
        LegatoError: the opening's model, adapter or tasks cannot be served.
    """

    def __init__(self, dispatcher: Dispatcher, opening: pb.SessionOpen, max_age: float) -> None:
        self._dispatcher = dispatcher
        self._options = inference_pb2.RequestOptions(model=opening.model, adapter=opening.adapter)
        self._deltas = opening.stream_deltas
        self._clock = CaptureClock(max_age)
        self._tracks = FrameTracks()
        self.model: ServedModel = dispatcher.model(opening.model, opening.adapter)
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
            SessionOutOfOrder: the frame has no stamp.
        """
        if not message.HasField("stamp"):
            raise SessionOutOfOrder("a frame needs its stamp", field="frame.stamp")
        stamp, age = message.stamp, 0.0
        if stamp.HasField("capture_time"):
            captured_time = skills.seconds(stamp.capture_time)
            set_back = self._clock.set_back
            age = self._clock.age(captured_time, wall_clock)
            if self._clock.set_back > set_back == 0:  # once a session: a client may do it at will
                log.warning("capture_clock_set_back", seconds=round(self._clock.set_back, 3))
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
        """Convert the tasks; an invalid list becomes one failed task without an id."""
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
        sampling = requests.sampling(message.sampling, path)
        request = requests.request(
            RequestKey(""), task, sampling, self._options, deltas=self._deltas
        )
        self._dispatcher.check(request, path)
        return request


def _over_quota() -> QuotaExceeded | None:
    """Count a frame as a request of the session's credential."""
    principal = call.current().principal
    try:
        if principal is not None:
            principal.take_request()
    except QuotaExceeded as error:
        return error
    return None
