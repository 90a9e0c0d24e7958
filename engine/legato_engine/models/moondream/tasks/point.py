"""The point skill."""

from __future__ import annotations

from legato_engine.core.events import PointEvent
from legato_engine.core.geometry import Point
from legato_engine.core.results import FinishReason, PointResult
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.object_list import Listing, ObjectListSkill
from legato_engine.models.moondream.tasks.skill_task import TaskSetup

# Ints, because enum lookup is slow.
_X, _Y = int(Allow.POINT_X), int(Allow.POINT_Y)


class PointSkill(ObjectListSkill[PointEvent]):
    """Points: x and y of each, then EOS."""

    tokens_per_object = 2
    default_max_objects = 150

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup, listing)
        self._x = 0.0

    def constraint(self) -> int:
        return _Y if self._certainties else _X

    def result(self, finish_reason: FinishReason) -> PointResult:
        return PointResult(points=self._ordered())

    def _begin(self, payload: tuple[float, float]) -> None:
        self._x = payload[0]

    def _complete(self, payload: tuple[float, float], confidence: float | None) -> PointEvent:
        point = Point(x=self._x, y=payload[0])
        return PointEvent(point=point, label=self._label, confidence=confidence)
