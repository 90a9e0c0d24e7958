"""What a session's frames are asked: checked when it is said, made into requests by each frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
from legato.v1 import media_pb2, task_pb2
from legato.v1 import session_pb2 as pb
from legato_engine import core
from legato_engine.errors import InvalidField, LegatoError, SessionProtocol
from legato_engine.ipc.messages import ModelInfo

from legato_service.convert import requests
from legato_service.requests.dispatcher import Dispatcher
from legato_service.session.capture_clock import CaptureClock
from legato_service.session.frame import Frame


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task as asked, its request still without an id; or what is wrong with it."""

    task_id: str
    asked: core.Request | LegatoError


@dataclasses.dataclass(eq=False, kw_only=True)
class Job(Frame):
    """A frame with all that it takes to run it."""

    stamp: media_pb2.FrameStamp
    image: media_pb2.Image | None  # None once it was taken in
    tasks: tuple[PlannedTask, ...]


class Planner:
    """Turns the messages of one session into jobs.

    Raises, when the session opens, what is wrong with its model, its adapter or its tasks.
    """

    def __init__(self, dispatcher: Dispatcher, opening: pb.SessionOpen, max_age: float) -> None:
        self._dispatcher = dispatcher
        self._options = {"model": opening.model, "adapter": opening.adapter}
        self._deltas = opening.stream_deltas
        self._clock = CaptureClock(max_age)
        self.model: ModelInfo = dispatcher.model(opening.model, opening.adapter)
        self._standing = self._checked(opening.standing_tasks, "open.standing_tasks")

    def update(self, messages: Sequence[task_pb2.Task]) -> None:
        """Replace the standing tasks; raises `InvalidField` and the like."""
        self._standing = self._checked(messages, "update.standing_tasks")

    def job(self, message: pb.Frame, now: float, wall_clock: float) -> Job:
        """A frame that arrived at `now` on our clock, `wall_clock` on everybody's.

        Raises `SessionProtocol` when nothing names it.
        """
        if not message.HasField("stamp"):
            raise SessionProtocol("a frame needs its stamp", field="frame.stamp")
        stamp, age = message.stamp, 0.0
        if stamp.HasField("capture_time"):
            age = self._clock.age(stamp.capture_time.ToNanoseconds() / 1e9, wall_clock)
        tasks = self._tasks(message)
        return Job(
            sequence=stamp.sequence,
            task_ids=tuple(task.task_id for task in tasks),
            born=now - age,
            must_run=message.must_run,
            stamp=stamp,
            image=message.image,
            tasks=tasks,
        )

    def _tasks(self, message: pb.Frame) -> tuple[PlannedTask, ...]:
        """The frame's tasks; a list that makes no sense is one failed task without a name."""
        standing = () if message.skip_standing_tasks else self._standing
        extra = tuple(
            self._planned(each, f"frame.extra_tasks[{index}]")
            for index, each in enumerate(message.extra_tasks[: requests.MAX_TASKS + 1])
        )
        tasks = (*standing, *extra)
        names = [task.task_id for task in tasks if task.task_id]
        limit = requests.MAX_TASKS
        if not 1 <= len(tasks) <= limit:
            error = InvalidField(f"a frame has 1 to {limit} tasks", field="frame", limit=limit)
        elif len(names) != len(set(names)):
            error = InvalidField("the ids of a frame's tasks must differ", field="frame")
        else:
            return tasks
        return (PlannedTask("", error),)

    def _checked(self, messages: Sequence[task_pb2.Task], field: str) -> tuple[PlannedTask, ...]:
        specs = requests.tasks(messages, field, least=0)
        return tuple(
            PlannedTask(message.task_id, self._request(spec, message, f"{field}[{index}]."))
            for index, (spec, message) in enumerate(zip(specs, messages, strict=True))
        )

    def _planned(self, message: task_pb2.Task, path: str) -> PlannedTask:
        try:
            spec = requests.task(message, path)
            return PlannedTask(message.task_id, self._request(spec, message, f"{path}."))
        except LegatoError as error:
            return PlannedTask(message.task_id[: requests.MAX_TASK_ID], error)

    def _request(self, spec: core.TaskSpec, message: task_pb2.Task, path: str) -> core.Request:
        """The request; the picture is kept for the frame's other tasks: it is encoded once."""
        sampling = requests.sampling(message.sampling, path)
        asked = requests.request(
            core.RequestKey(""), spec, sampling, self._options, deltas=self._deltas
        )
        self._dispatcher.check(asked, path)
        return msgspec.structs.replace(asked, cache_image=True)
