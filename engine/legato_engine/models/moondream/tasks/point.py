"""Point at every instance of an object."""

from __future__ import annotations

from legato_engine.core import Event, FinishReason, Point, PointEvent, PointResult
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.base import SkillTask, TaskSetup
from legato_engine.tasks import SampledToken

DEFAULT_MAX_OBJECTS = 150
TOKENS_PER_OBJECT = 2


class PointSkill(SkillTask):
    """x, y, then the next x or EOS."""

    constrained = True
    has_payload = True

    def __init__(self, setup: TaskSetup, label: str, max_objects: int) -> None:
        super().__init__(setup)
        self._label = label
        self._max_objects = max_objects
        self._x: float | None = None
        self._points: list[PointEvent] = []

    def constraint(self) -> int:
        """Follows the cycle."""
        return Allow.COORD_OR_EOS if self._x is None else Allow.COORD

    def result(self, finish_reason: FinishReason) -> PointResult:
        """The points completed so far."""
        return PointResult(points=tuple(self._points))

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if self._x is None:
            self._x = token.payload[0]
            return []
        point = Point(x=self._x, y=token.payload[0])
        self._x = None
        self._points.append(PointEvent(point=point, label=self._label))
        if len(self._points) == self._max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [self._points[-1]]
