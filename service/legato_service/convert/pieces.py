"""Parts of results to protobuf messages."""

from __future__ import annotations

from legato.v1 import geometry_pb2, task_pb2
from legato_engine.core.events import Grounding, ObjectEvent, PointEvent
from legato_engine.core.geometry import Box, Point
from legato_engine.core.results import Outline


def grounding(value: Grounding) -> task_pb2.Grounding:
    return task_pb2.Grounding(
        start_index=value.start_index,
        end_index=value.end_index,
        points=[_point(each) for each in value.points],
    )


def fill_object(message: geometry_pb2.DetectedObject, value: ObjectEvent) -> None:
    message.label = value.label
    box, found = message.box, value.box
    box.x_min, box.y_min, box.x_max, box.y_max = found.x_min, found.y_min, found.x_max, found.y_max
    if value.confidence is not None:
        message.confidence = value.confidence


def fill_pointed(message: geometry_pb2.PointedObject, value: PointEvent) -> None:
    message.label = value.label
    message.point.x, message.point.y = value.point.x, value.point.y
    if value.confidence is not None:
        message.confidence = value.confidence


def outline(value: Outline) -> geometry_pb2.Outline:
    return geometry_pb2.Outline(
        path=value.path,
        box=box(value.box),
        label=value.label,
        confidence=value.confidence,
        coarse=value.coarse,
    )


def _point(value: Point) -> geometry_pb2.Point:
    return geometry_pb2.Point(x=value.x, y=value.y)


def box(value: Box) -> geometry_pb2.Box:
    return geometry_pb2.Box(
        x_min=value.x_min, y_min=value.y_min, x_max=value.x_max, y_max=value.y_max
    )
