"""How a request ended: its result, and what it took."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

from legato_engine.core.events import Grounding, ObjectEvent, PointEvent
from legato_engine.core.geometry import Box
from legato_engine.core.value import Value


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    MAX_OBJECTS = "max_objects"
    CANCELLED = "cancelled"


class Result(Value, frozen=True):
    """What any task gives; `has_places`: each object in it has a place and a confidence."""

    has_places: ClassVar[bool] = False


class QueryResult(Result, frozen=True):
    """The result of a `QueryTask`."""

    answer: str
    reasoning: str | None = None
    grounding: tuple[Grounding, ...] = ()


class CaptionResult(Result, frozen=True):
    """The result of a `CaptionTask`."""

    caption: str


class DetectResult(Result, frozen=True):
    """All boxes."""

    has_places: ClassVar[bool] = True
    objects: tuple[ObjectEvent, ...] = ()


class PointResult(Result, frozen=True):
    """All points."""

    has_places: ClassVar[bool] = True
    points: tuple[PointEvent, ...] = ()


class Outline(Value, frozen=True):
    """An SVG path with coordinates in the unit square of `box`."""

    path: str
    box: Box
    label: str
    coarse: bool = True
    confidence: float | None = None


class SegmentResult(Result, frozen=True):
    """All outlines."""

    has_places: ClassVar[bool] = True
    segments: tuple[Outline, ...] = ()


TaskResult = QueryResult | CaptionResult | DetectResult | PointResult | SegmentResult

SKILL_OF_RESULT: Mapping[type[TaskResult], str] = {
    QueryResult: "query",
    CaptionResult: "caption",
    DetectResult: "detect",
    PointResult: "point",
    SegmentResult: "segment",
}


class ConfidenceInfo(Value, frozen=True):
    """Skills whose results have confidences, and those of them that were calibrated."""

    skills: tuple[str, ...]
    calibrated: tuple[str, ...] = ()
    fitted_on: str = ""
    fitted_at: int = 0  # seconds since the epoch; 0: not calibrated


class Usage(Value, frozen=True):
    """Numbers of tokens; `cached_tokens` came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(Value, frozen=True):
    """Seconds of each part of a request."""

    queue: float = 0.0
    image: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0
