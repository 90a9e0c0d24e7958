"""How tracked objects move."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class BoxAxes:
    """A value for each axis of a box, as shares of the image's width or height."""

    center_x: float
    center_y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Motion:
    """Position, velocity and acceleration of a box when its frame was captured.

    Times are in seconds. The deviations are standard deviations.
    """

    position: BoxAxes
    velocity: BoxAxes
    acceleration: BoxAxes
    position_deviation: BoxAxes
    velocity_deviation: BoxAxes
    acceleration_deviation: BoxAxes

    def after(self, seconds: float) -> BoxAxes:
        """Where the box is expected so long after the frame's capture."""
        axes = zip(*map(astuple, (self.position, self.velocity, self.acceleration)), strict=True)
        return BoxAxes(*(p + v * seconds + a * seconds**2 / 2 for p, v, a in axes))

    def deviation_after(self, seconds: float) -> BoxAxes:
        """The standard deviation of `after`."""
        parts = (self.position_deviation, self.velocity_deviation, self.acceleration_deviation)
        axes = zip(*map(astuple, parts), strict=True)
        return BoxAxes(*(math.hypot(p, v * seconds, a * seconds**2 / 2) for p, v, a in axes))
