"""Skills that list instances."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Generic, TypeVar

from legato_engine.core.events import Event, ObjectEvent, PointEvent
from legato_engine.core.results import FinishReason
from legato_engine.core.task_specs import DetectTask, ObjectOrder, PointTask
from legato_engine.core.tokens import Certainty
from legato_engine.models.moondream.tasks.skill_task import SkillTask, TaskSetup
from legato_engine.tasks import SampledToken

InstanceT = TypeVar("InstanceT", ObjectEvent, PointEvent)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What is listed, and which of it."""

    label: str
    max_objects: int
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL

    @classmethod
    def of(cls, task: DetectTask | PointTask, label: str, max_objects: int) -> Listing:
        return cls(label, max_objects, task.min_confidence, task.order)


class ObjectListSkill(SkillTask, Generic[InstanceT]):
    """Instances of `tokens_per_object` tokens, until EOS or `max_objects`."""

    constrained = True
    has_payload = True
    tokens_per_object: ClassVar[int]
    default_max_objects: ClassVar[int]

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup)
        self._label = listing.label
        self._listing = listing
        self._found: list[InstanceT] = []
        self._certainties: list[Certainty | None] = []  # of the object that is being read

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        self._certainties.append(token.certainty)
        if len(self._certainties) < self.tokens_per_object:
            self._begin(token.payload)
            return []
        confidence = self._confidence(self._certainties)
        self._certainties = []
        instance = self._complete(token.payload, confidence)
        if confidence is not None and confidence < self._listing.min_confidence:
            return []
        self._found.append(instance)
        if len(self._found) == self._listing.max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [instance]

    def _ordered(self) -> tuple[InstanceT, ...]:
        if self._listing.order is ObjectOrder.MODEL:
            return tuple(self._found)
        return tuple(sorted(self._found, key=_rank))

    @abc.abstractmethod
    def _begin(self, payload: tuple[float, float]) -> None:
        """Read a value that completes nothing."""

    @abc.abstractmethod
    def _complete(self, payload: tuple[float, float], confidence: float | None) -> InstanceT: ...


def _rank(instance: ObjectEvent | PointEvent) -> float:
    return 1.0 if instance.confidence is None else -instance.confidence
