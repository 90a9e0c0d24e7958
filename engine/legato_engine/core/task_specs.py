"""What a request asks a model to do: one type for each skill."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from legato_engine.core.geometry import SpatialRef
from legato_engine.core.value import Value


class CaptionLength(enum.StrEnum):
    """The length of a caption."""

    SHORT = "short"
    NORMAL = "normal"
    LONG = "long"


class Turn(Value, frozen=True):
    """An earlier question and answer."""

    question: str
    answer: str


class QueryTask(Value, frozen=True):
    """Answer a question, about the image if there is one.

    The image precedes the first question of `history`; `shows_image` requires one. Then that
    question may be empty: it asks for a description.
    """

    question: str
    reasoning: bool = False
    spatial_refs: tuple[SpatialRef, ...] = ()
    system: str = ""
    history: tuple[Turn, ...] = ()
    shows_image: bool = False

    @property
    def num_characters(self) -> int:
        earlier = sum(len(turn.question) + len(turn.answer) for turn in self.history)
        return len(self.system) + earlier + len(self.question)


class CaptionTask(Value, frozen=True):
    """Describe the image."""

    length: CaptionLength = CaptionLength.NORMAL


class ObjectOrder(enum.StrEnum):
    """The order of objects in a result."""

    MODEL = "model"
    CONFIDENCE = "confidence"  # the greatest first


class DetectTask(Value, frozen=True):
    """Find all instances of `object`, but for those of a known and lower `min_confidence`."""

    object: str
    max_objects: int | None = None
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL


class PointTask(Value, frozen=True):
    """Point at all instances of `object`; see `DetectTask`."""

    object: str
    max_objects: int | None = None
    spatial_refs: tuple[SpatialRef, ...] = ()
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL


class SegmentTask(Value, frozen=True):
    """Outline one instance of `object`."""

    object: str
    spatial_refs: tuple[SpatialRef, ...] = ()


TaskSpec = QueryTask | CaptionTask | DetectTask | PointTask | SegmentTask

SKILL_OF_TASK: Mapping[type[TaskSpec], str] = {
    QueryTask: "query",
    CaptionTask: "caption",
    DetectTask: "detect",
    PointTask: "point",
    SegmentTask: "segment",
}
SKILLS = tuple(SKILL_OF_TASK.values())
