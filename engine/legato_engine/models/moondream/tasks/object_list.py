"""Skills that list instances."""

from __future__ import annotations

import abc
from typing import ClassVar, Generic, TypeVar

from legato_engine.core import Event, FinishReason, ObjectEvent, PointEvent
from legato_engine.models.moondream.tasks.skill_task import SkillTask, TaskSetup
from legato_engine.tasks import SampledToken

InstanceT = TypeVar("InstanceT", ObjectEvent, PointEvent)


class ObjectListSkill(SkillTask, Generic[InstanceT]):
    """Instances of `tokens_per_object` tokens, until EOS or `max_objects`."""

    constrained = True
    has_payload = True
    tokens_per_object: ClassVar[int]
    default_max_objects: ClassVar[int]

    def __init__(self, setup: TaskSetup, label: str, max_objects: int) -> None:
        super().__init__(setup)
        self._label = label
        self._max_objects = max_objects
        self._found: list[InstanceT] = []

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        instance = self._complete(token.payload)
        if instance is None:
            return []
        self._found.append(instance)
        if len(self._found) == self._max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [instance]

    @abc.abstractmethod
    def _complete(self, payload: tuple[float, float]) -> InstanceT | None: ...
