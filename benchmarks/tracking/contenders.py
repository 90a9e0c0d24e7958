"""Trackers in the same words: a frame in, a name for each of its boxes out."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol
from unittest import mock

import numpy as np
from legato_service import tracking
from legato_service.tracking import Tracker, TrackIds

from benchmarks.tracking.clips import Array, Frame

MAX_UNSEEN = 2.0  # seconds, for all
_PIXELS = 1000  # a side of the picture, for trackers that count in pixels
_FADING = 0.05  # seconds: an acceleration that fades at once is noise of the velocity


class Follower(Protocol):
    """Follows the objects of one clip."""

    def observe(self, frame: Frame) -> list[str]:
        """Names of the boxes; "" for none."""
        ...


class Ours:
    """The service's own."""

    def __init__(self) -> None:
        self._tracker = Tracker(TrackIds(512), MAX_UNSEEN)

    def observe(self, frame: Frame) -> list[str]:
        found = self._tracker.observe(frame.sequence, frame.time, frame.found_DA)
        return [each.track_id if each else "" for each in found]


class Library:
    """A tracker of `trackers`; it is told the mean rate of frames, and takes them as they come."""

    def __init__(self, kind: str, fps: float, **options: Any) -> None:
        import supervision
        import trackers

        self._detections = supervision.Detections
        self._tracker = getattr(trackers, kind)(
            frame_rate=fps,
            lost_track_buffer=round(30 * MAX_UNSEEN),
            minimum_consecutive_frames=1,
            **options,
        )

    def observe(self, frame: Frame) -> list[str]:
        boxes = frame.found_DA * _PIXELS
        corners = np.concatenate(
            [boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1
        )
        found = self._detections(
            xyxy=corners.astype(np.float32),
            confidence=np.full(len(corners), 0.9, np.float32),
            class_id=np.arange(len(corners)),  # it keeps no order, and only passes these on
        )
        tracked = self._tracker.update(found)
        names = [""] * len(corners)
        for index, number in zip(tracked.class_id, tracked.tracker_id, strict=True):
            if number >= 0:
                names[index] = str(number)
        return names


@contextlib.contextmanager
def contender(name: str) -> Iterator[None]:
    """Ours with one part exchanged, for the length of the block."""
    with contextlib.ExitStack() as stack:
        if name == "ours, scipy":
            stack.enter_context(mock.patch.object(tracking, "assign", _by_scipy))
        if name == "ours, velocity":
            # The same noise of the velocity in a second, without a memory of the acceleration.
            factor = np.sqrt(tracking.FADING / _FADING)
            noise_A = tracking.ACCELERATION_A * factor
            stack.enter_context(mock.patch.object(tracking, "ACCELERATION_A", noise_A))
            stack.enter_context(mock.patch.object(tracking, "FADING", _FADING))
        tracking.forget_transitions()
        yield
    tracking.forget_transitions()


def _by_scipy(gain_TD: Array) -> list[tuple[int, int]]:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(-np.maximum(gain_TD, 0))
    pairs = ((int(row), int(column)) for row, column in zip(rows, columns, strict=True))
    return [(row, column) for row, column in pairs if gain_TD[row, column] > 0]


def follower(name: str, fps: float) -> Follower:
    """Make a follower for a clip of which `fps` frames a second are answered."""
    match name:
        case "ByteTrack":
            return Library("ByteTrackTracker", fps, track_activation_threshold=0.25)
        case "OC-SORT":
            return Library("OCSORTTracker", fps, high_conf_det_threshold=0.25)
        case _:
            return Ours()


def installed() -> list[str]:
    """List the contenders that can run here."""
    names = ["ours"]
    if importlib.util.find_spec("scipy"):
        names.append("ours, scipy")
    names.append("ours, velocity")
    if importlib.util.find_spec("trackers"):
        names += ["ByteTrack", "OC-SORT"]
    return names
