"""The detect skill."""

from __future__ import annotations

from legato_engine.core.events import ObjectEvent
from legato_engine.core.geometry import Box
from legato_engine.core.results import DetectResult, FinishReason
from legato_engine.models.moondream.constraints import Allow
from legato_engine.models.moondream.tasks.object_list import Listing, ObjectListSkill
from legato_engine.models.moondream.tasks.skill_task import TaskSetup

# Ints, because enum lookup is slow.
_CYCLE = (int(Allow.DETECT_X), int(Allow.DETECT_Y), int(Allow.DETECT_SIZE))


class DetectSkill(ObjectListSkill[ObjectEvent]):
    """Boxes: x, y and size of each, then EOS."""

    tokens_per_object = 3
    default_max_objects = 50

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup, listing)
        self._centre: list[float] = []

    def constraint(self) -> int:
        return _CYCLE[len(self._centre)]

    def result(self, finish_reason: FinishReason) -> DetectResult:
        return DetectResult(objects=self._ordered())

    def _begin(self, payload: tuple[float, float]) -> None:
        self._centre.append(payload[0])

    def _complete(self, payload: tuple[float, float], confidence: float | None) -> ObjectEvent:
        box = centred_box((self._centre[0], self._centre[1]), payload)
        self._centre = []
        return ObjectEvent(box=box, label=self._label, confidence=confidence)


def centred_box(centre: tuple[float, float], size: tuple[float, float]) -> Box:
    """Cut the box to the image."""
    (x, y), (width, height) = centre, size
    return Box(
        x_min=max(0.0, x - width / 2),
        y_min=max(0.0, y - height / 2),
        x_max=min(1.0, x + width / 2),
        y_max=min(1.0, y + height / 2),
    )
