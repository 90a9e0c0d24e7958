"""Box every instance of an object."""

from __future__ import annotations

from legato_engine.core import Box, DetectResult, Event, FinishReason, ObjectEvent
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.base import SkillTask, TaskSetup
from legato_engine.tasks import SampledToken

DEFAULT_MAX_OBJECTS = 50
TOKENS_PER_OBJECT = 3


class DetectSkill(SkillTask):
    """x, y, size, then the next x or EOS."""

    constrained = True
    has_payload = True

    def __init__(self, setup: TaskSetup, label: str, max_objects: int) -> None:
        super().__init__(setup)
        self._label = label
        self._max_objects = max_objects
        self._centre: list[float] = []
        self._objects: list[ObjectEvent] = []

    def constraint(self) -> int:
        """Follows the cycle."""
        return (Allow.COORD_OR_EOS, Allow.COORD, Allow.SIZE)[len(self._centre)]

    def result(self, finish_reason: FinishReason) -> DetectResult:
        """The boxes completed so far."""
        return DetectResult(objects=tuple(self._objects))

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if len(self._centre) < 2:
            self._centre.append(token.payload[0])
            return []
        box = centred_box((self._centre[0], self._centre[1]), token.payload)
        self._centre = []
        self._objects.append(ObjectEvent(box=box, label=self._label))
        if len(self._objects) == self._max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [self._objects[-1]]


def centred_box(centre: tuple[float, float], size: tuple[float, float]) -> Box:
    """The box around a centre, cut to the picture."""
    (x, y), (width, height) = centre, size
    return Box(
        x_min=max(0.0, x - width / 2),
        y_min=max(0.0, y - height / 2),
        x_max=min(1.0, x + width / 2),
        y_max=min(1.0, y + height / 2),
    )
