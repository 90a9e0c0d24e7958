"""The trackers of a session's standing tasks, and what they say in results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from legato.v1 import geometry_pb2, task_pb2

from legato_service.convert import requests
from legato_service.tracking.box_filter import Array
from legato_service.tracking.tracker import Tracked, Tracker, TrackIds

MAX_TRACKS = 512  # alive in a session; about 4 KiB each


class FrameTracks:
    """The trackers of the standing tasks."""

    def __init__(self) -> None:
        self._ids = TrackIds(MAX_TRACKS)
        self._trackers: list[tuple[tuple[str, str], Tracker]] = []  # by task id and object

    def replace(self, messages: Sequence[task_pb2.Task]) -> list[Tracker | None]:
        """Return the trackers of new standing tasks; a task that goes on keeps its own."""
        asked = [
            requests.tracking(message.detect.tracking)
            if message.detect.HasField("tracking")
            else None
            for message in messages
        ]
        old, self._trackers = self._trackers, []
        trackers = [
            None if seconds is None else self._tracker(message, seconds, old)
            for message, seconds in zip(messages, asked, strict=True)
        ]
        for _, tracker in old:
            tracker.close()
        return trackers

    def _tracker(
        self,
        message: task_pb2.Task,
        max_unseen: float,
        old: list[tuple[tuple[str, str], Tracker]],
    ) -> Tracker:
        """Taken from `old` where the task was there before."""
        key = (message.task_id, message.detect.object)
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
    """Centre x, centre y, width, height."""
    width, height = box.x_max - box.x_min, box.y_max - box.y_min
    return box.x_min + width / 2, box.y_min + height / 2, width, height
