"""Answers of several tasks as one Detection2DArray."""

from __future__ import annotations

from collections.abc import Sequence

from legato_client import ros2
from legato_client._errors import LegatoError
from legato_client._values.results import (
    Detection,
    DetectResult,
    Outline,
    PointResult,
    Result,
)


def of(
    outcomes: Sequence[Result | LegatoError],
    header: ros2.HeaderLike,
    size: tuple[int, int],
    absent_score: float,
) -> ros2.Detection2DArray:
    """What was found, task by task; outlines are their boxes, points boxes without a size.

    `size` is the image's in pixels. A task that failed has nothing, nor has an answer in words.
    """
    own = ros2.Header(ros2.Time(header.stamp.sec, header.stamp.nanosec), header.frame_id)
    stamp = ros2.frame_stamp(own, 0)
    found: list[ros2.Detection2D] = []
    for outcome in map(_as_boxes, outcomes):
        if isinstance(outcome, DetectResult | PointResult):
            array = ros2.detections(outcome, stamp=stamp, size=size, absent_score=absent_score)
            found += array.detections
    return ros2.Detection2DArray(own, tuple(found))


def _as_boxes(outcome: Result | LegatoError) -> Result | LegatoError:
    if isinstance(outcome, LegatoError):
        return outcome
    outlines = [mark for mark in outcome.marks if isinstance(mark, Outline)]
    if not outlines:
        return outcome
    boxes = tuple(Detection(each.box, each.label, each.confidence) for each in outlines)
    return DetectResult(boxes, outcome.info)
