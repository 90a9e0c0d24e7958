"""Tracked objects at a moment."""

from __future__ import annotations

from dataclasses import dataclass

from legato_client._values.motion import BoxAxes
from legato_client._values.results import Box, Detection


@dataclass(frozen=True, slots=True)
class TrackNow:
    """A tracked object at the moment of `Session.now`, `age` seconds after it was last found.

    `axes` is the centre and size of where it is expected, `deviation` their standard deviations.
    `last` is what the model found, in frame `sequence`, for task `task_id`.
    """

    axes: BoxAxes
    deviation: BoxAxes
    age: float
    last: Detection
    sequence: int
    task_id: str

    @property
    def track_id(self) -> str:
        """Names the object, in this session only."""
        return self.last.track_id

    @property
    def label(self) -> str:
        """What it is."""
        return self.last.label

    @property
    def box(self) -> Box:
        """Where it is expected, perhaps beyond the image."""
        center_x, center_y = self.axes.center_x, self.axes.center_y
        across, down = max(self.axes.width, 0.0) / 2, max(self.axes.height, 0.0) / 2
        return Box(center_x - across, center_y - down, center_x + across, center_y + down)
