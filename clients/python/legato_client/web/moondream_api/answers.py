"""What Moondream's own endpoint gives."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from legato_client._values.events import Event, Finished, OutlineDelta, TextDelta
from legato_client._values.results import (
    Box,
    CaptionResult,
    DetectResult,
    Grounding,
    PointResult,
    QueryResult,
    Reasoning,
    Result,
    SegmentResult,
)


class Region(Struct):
    """A box, in fractions of the image; `confidence` is an addition, where the model has one."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float
    confidence: float | UnsetType = UNSET


class Point(Struct):
    """A point, in fractions of the image; `confidence` as of a region."""

    x: float
    y: float
    confidence: float | UnsetType = UNSET


class GroundedSpan(Struct):
    """Points that characters `start_idx` to `end_idx` of the reasoning speak of, each [x, y]."""

    start_idx: int
    end_idx: int
    points: list[tuple[float, float]]


class Thoughts(Struct):
    """What the model thought before it answered."""

    text: str
    grounding: list[GroundedSpan]


class Answer(Struct, kw_only=True):
    """What all answers share; `finish_reason` as in Legato's contract."""

    request_id: str
    finish_reason: str


class CaptionAnswer(Answer):
    """Of `/v1/caption`."""

    caption: str


class QueryAnswer(Answer):
    """Of `/v1/query`."""

    answer: str
    reasoning: Thoughts | UnsetType = UNSET


class DetectAnswer(Answer):
    """Of `/v1/detect`."""

    objects: list[Region]


class PointAnswer(Answer):
    """Of `/v1/point`."""

    points: list[Point]
    count: int


class SegmentAnswer(Answer):
    """Of `/v1/segment`. `path` is empty where nothing was found."""

    path: str
    bbox: Region | None


class TextEvent(Struct):
    """A piece of a caption or an answer; the last event is `completed` and has no piece."""

    chunk: str | UnsetType = UNSET
    completed: bool | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    reasoning: Thoughts | UnsetType = UNSET


class BoxEvent(Struct, tag_field="type", tag="bbox"):
    """The box of the outline, first."""

    bbox: Region


class PathEvent(Struct, tag_field="type", tag="path_delta"):
    """A piece of the coarse path."""

    chunk: str
    completed: bool = False


class OutlineEvent(Struct, tag_field="type", tag="final", kw_only=True):
    """The whole outline, last."""

    path: str
    bbox: Region | None
    request_id: str
    finish_reason: str
    completed: bool = True


SegmentEvent = BoxEvent | PathEvent | OutlineEvent


def answer_of(result: Result) -> Answer:
    """The answer of the skill that gave the result."""
    about = {"request_id": result.info.request_id, "finish_reason": result.info.finish_reason}
    match result:
        case CaptionResult():
            return CaptionAnswer(caption=result.caption, **about)
        case QueryResult():
            return QueryAnswer(answer=result.answer, reasoning=_thoughts(result), **about)
        case DetectResult():
            return DetectAnswer(
                objects=[_region(each.box, each.confidence) for each in result.objects], **about
            )
        case PointResult():
            points = [
                Point(each.point.x, each.point.y, _known(each.confidence)) for each in result.points
            ]
            return PointAnswer(points=points, count=len(points), **about)
        case SegmentResult():
            path, bbox = _outline(result)
            return SegmentAnswer(path=path, bbox=bbox, **about)


def event_of(event: Event) -> TextEvent | SegmentEvent | None:
    """None for what this form of a stream does not tell."""
    match event:
        case TextDelta():
            return TextEvent(chunk=event.text)
        case OutlineDelta(index=0, box=Box() as box):
            return BoxEvent(_region(box))
        case OutlineDelta(index=0):
            return PathEvent(event.path_delta)
        case Finished(result):
            return _last(result)
        case _:
            return None


def _last(result: Result) -> TextEvent | OutlineEvent:
    info = result.info
    if isinstance(result, SegmentResult):
        path, bbox = _outline(result)
        return OutlineEvent(
            path=path, bbox=bbox, request_id=info.request_id, finish_reason=info.finish_reason
        )
    return TextEvent(
        completed=True,
        request_id=info.request_id,
        finish_reason=info.finish_reason,
        reasoning=_thoughts(result) if isinstance(result, QueryResult) else UNSET,
    )


def _outline(result: SegmentResult) -> tuple[str, Region | None]:
    """The first: this form has a place for one."""
    if not result.segments:
        return "", None
    outline = result.segments[0]
    return outline.path, _region(outline.box, outline.confidence)


def _region(box: Box, confidence: float | None = None) -> Region:
    return Region(box.x_min, box.y_min, box.x_max, box.y_max, _known(confidence))


def _known(confidence: float | None) -> float | UnsetType:
    return UNSET if confidence is None else confidence


def _thoughts(result: QueryResult) -> Thoughts | UnsetType:
    reasoning = result.reasoning
    if reasoning is None:
        return UNSET
    return Thoughts(reasoning.text, spans_of(reasoning))


def spans_of(reasoning: Reasoning) -> list[GroundedSpan]:
    return [_span(each) for each in reasoning.grounding]


def _span(grounding: Grounding) -> GroundedSpan:
    points = [(point.x, point.y) for point in grounding.points]
    return GroundedSpan(grounding.start_index, grounding.end_index, points)
