"""Places in an image, normalised to 0..1."""

from __future__ import annotations

from legato_engine.core.value import Value


class Point(Value, frozen=True):
    """A point in the displayed image: origin top-left, y down, 0..1."""

    x: float
    y: float


class Box(Value, frozen=True):
    """A box in the displayed image, 0..1; `x_min <= x_max`, `y_min <= y_max`."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


SpatialRef = Point | Box
