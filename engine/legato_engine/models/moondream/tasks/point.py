"""The point skill."""

from __future__ import annotations

from legato_engine.core import FinishReason, Point, PointEvent, PointResult
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.object_list import ObjectListSkill
from legato_engine.models.moondream.tasks.skill_task import TaskSetup

# Ints, because enum lookup is slow.
_X, _Y = int(Allow.POINT_X), int(Allow.POINT_Y)


class PointSkill(ObjectListSkill[PointEvent]):
    """Points: x and y of each, then EOS."""

    tokens_per_object = 2
    default_max_objects = 150

    def __init__(self, setup: TaskSetup, label: str, max_objects: int) -> None:
        super().__init__(setup, label, max_objects)
        self._x: float | None = None

    def constraint(self) -> int:
        return _X if self._x is None else _Y

    def result(self, finish_reason: FinishReason) -> PointResult:
        return PointResult(points=tuple(self._found))

    def _complete(self, payload: tuple[float, float]) -> PointEvent | None:
        if self._x is None:
            self._x = payload[0]
            return None
        point = Point(x=self._x, y=payload[0])
        self._x = None
        return PointEvent(point=point, label=self._label)
