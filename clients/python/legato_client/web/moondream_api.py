"""Moondream's endpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from legato_client._proto import skills
from legato_client._proto.skills import AnySkill
from legato_client._types import results
from legato_client._types.tasks import Sampling, SpatialRef, Task
from legato_client.web import bodies, streams
from legato_client.web.errors import RejectedRequest
from legato_client.web.operations import (
    MAX_COUNT,
    OperationRoute,
    options_of,
    respond,
    sampling_of,
)
from legato_client.web.server import backend_of

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Place = Annotated[list[float], Meta(min_length=2, max_length=4)]
"""[x, y], or [x_min, y_min, x_max, y_max]: fractions of the image."""


class Settings(Struct, forbid_unknown_fields=True):
    """Sampling and object options; `min_confidence` is an addition."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Count | None = None
    max_objects: Count | None = None
    min_confidence: Annotated[float, Meta(ge=0, le=1)] | None = None

    def sampling(self) -> Sampling:
        return sampling_of(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens
        )


class Question(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all bodies; `image_url` is a data URL."""

    image_url: str | None
    model: str | None = None
    settings: Settings = msgspec.field(default_factory=Settings)
    stream: bool = False

    skill: ClassVar[AnySkill]
    can_stream: ClassVar[bool] = True

    def task(self) -> Task:
        """Build the task. Raises RejectedRequest for places of no valid form."""
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        objects = {name: getattr(self.settings, name) for name in ("max_objects", "min_confidence")}
        refs = {"spatial_refs": places(own.get("spatial_refs"))}
        fields = {**own, **objects, **refs, "sampling": self.settings.sampling()}
        task: Task = self.skill.task(**{n: e for n, e in fields.items() if self.skill.takes(n)})
        return task


class CaptionBody(Question, kw_only=True):
    """Body or answer of `/v1/caption`."""

    image_url: str
    length: Literal["short", "normal", "long"] = "normal"

    skill = skills.CAPTION


class QueryBody(Question, kw_only=True):
    """Body or answer of `/v1/query`."""

    question: str
    image_url: str | None = None
    reasoning: bool = False
    spatial_refs: list[Place] | None = None

    skill = skills.QUERY


class DetectBody(Question, kw_only=True):
    """Body or answer of `/v1/detect`."""

    image_url: str
    object: str

    skill = skills.DETECT
    can_stream = False


class PointBody(Question, kw_only=True):
    """Body or answer of `/v1/point`."""

    image_url: str
    object: str
    spatial_refs: list[Place] | None = None

    skill = skills.POINT
    can_stream = False


class SegmentBody(Question, kw_only=True):
    """Body or answer of `/v1/segment`."""

    image_url: str
    object: str
    spatial_refs: list[Place] | None = None

    skill = skills.SEGMENT


def places(given: list[list[float]] | None) -> tuple[SpatialRef, ...]:
    """Convert places. Raises RejectedRequest for a place of neither form."""
    found: list[SpatialRef] = []
    for index, numbers in enumerate(given or ()):
        if len(numbers) == 2:
            found.append(results.Point(*numbers))
        elif len(numbers) == 4:
            found.append(results.Box(*numbers))
        else:
            raise RejectedRequest(
                "a place is [x, y] or [x_min, y_min, x_max, y_max]",
                field=f"spatial_refs[{index}]",
            )
    return tuple(found)


# ---------------------------------------------------------------- answers


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
    """Reasoning before the answer."""

    text: str
    grounding: list[GroundedSpan]


class Answer(Struct, kw_only=True):
    """Fields of all answers; `finish_reason` as in Legato's contract."""

    request_id: str
    finish_reason: str


class CaptionAnswer(Answer):
    """Body or answer of `/v1/caption`."""

    caption: str


class QueryAnswer(Answer):
    """Body or answer of `/v1/query`."""

    answer: str
    reasoning: Thoughts | UnsetType = UNSET


class DetectAnswer(Answer):
    """Body or answer of `/v1/detect`."""

    objects: list[Region]


class PointAnswer(Answer):
    """Body or answer of `/v1/point`."""

    points: list[Point]
    count: int


class SegmentAnswer(Answer):
    """Answer of `/v1/segment`; `path` is empty if nothing was found."""

    path: str
    bbox: Region | None


class TextChunk(Struct):
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


class FinalOutline(Struct, tag_field="type", tag="final", kw_only=True):
    """The whole outline, last."""

    path: str
    bbox: Region | None
    request_id: str
    finish_reason: str
    completed: bool = True


SegmentEvent = BoxEvent | PathEvent | FinalOutline


def answer_of(result: results.Result) -> Answer:
    """Build the answer of the skill that gave the result."""
    about = {"request_id": result.info.request_id, "finish_reason": result.info.finish_reason}
    match result:
        case results.CaptionResult():
            return CaptionAnswer(caption=result.caption, **about)
        case results.QueryResult():
            return QueryAnswer(answer=result.answer, reasoning=_thoughts(result.reasoning), **about)
        case results.DetectResult():
            return DetectAnswer(
                objects=[_region(each.box, each.confidence) for each in result.objects], **about
            )
        case results.PointResult():
            points = [
                Point(each.point.x, each.point.y, _known(each.confidence)) for each in result.points
            ]
            return PointAnswer(points=points, count=len(points), **about)
        case results.SegmentResult():
            if not result.segments:
                return SegmentAnswer(path="", bbox=None, **about)
            outline = result.segments[0]  # this form has a place for one
            region = _region(outline.box, outline.confidence)
            return SegmentAnswer(path=outline.path, bbox=region, **about)


def event_of(event: results.Event) -> TextChunk | SegmentEvent | None:
    """Convert an event; None if this stream format has no such event."""
    match event:
        case results.TextDelta():
            return TextChunk(chunk=event.text)
        case results.OutlineDelta(index=0, box=results.Box() as box):
            return BoxEvent(_region(box))
        case results.OutlineDelta(index=0):
            return PathEvent(event.path_delta)
        case results.Finished(result):
            return _last(answer_of(result))
        case _:
            return None


def _last(answer: Answer) -> TextChunk | FinalOutline:
    about: Any = {"request_id": answer.request_id, "finish_reason": answer.finish_reason}
    if isinstance(answer, SegmentAnswer):
        return FinalOutline(path=answer.path, bbox=answer.bbox, **about)
    reasoning = answer.reasoning if isinstance(answer, QueryAnswer) else UNSET
    return TextChunk(completed=True, reasoning=reasoning, **about)


def _region(box: results.Box, confidence: float | None = None) -> Region:
    return Region(box.x_min, box.y_min, box.x_max, box.y_max, _known(confidence))


def _known(confidence: float | None) -> float | UnsetType:
    return UNSET if confidence is None else confidence


def _thoughts(reasoning: results.Reasoning | None) -> Thoughts | UnsetType:
    return UNSET if reasoning is None else Thoughts(reasoning.text, spans_of(reasoning))


def spans_of(reasoning: results.Reasoning) -> list[GroundedSpan]:
    return [
        GroundedSpan(
            each.start_index, each.end_index, [(point.x, point.y) for point in each.points]
        )
        for each in reasoning.grounding
    ]


# ---------------------------------------------------------------- endpoints

# Endpoints that `moondream.vl(endpoint=...)` calls, except its chat.


_ENDPOINTS: tuple[tuple[type[Question], type[Answer], type | UnionType | None, str], ...] = (
    (CaptionBody, CaptionAnswer, TextChunk, "Describe an image"),
    (QueryBody, QueryAnswer, TextChunk, "Answer a question, about an image if one is sent"),
    (DetectBody, DetectAnswer, None, "Box every instance of an object"),
    (PointBody, PointAnswer, None, "Point at every instance of an object"),
    (SegmentBody, SegmentAnswer, SegmentEvent, "Outline an object"),
)

ANSWERS: Mapping[str, type[Answer]] = {body.skill.name: answer for body, answer, *_ in _ENDPOINTS}
"""Answers by the skill's name."""


def routes() -> list[OperationRoute]:
    return [
        OperationRoute(
            f"/v1/{body.skill.name}",
            functools.partial(_answer, kind=body),
            tag="Moondream",
            name=body.skill.name,
            summary=summary,
            body=body,
            answer=answer,
            event=event,
        )
        for body, answer, event, summary in _ENDPOINTS
    ]


async def _answer(request: Request, kind: type[Question]) -> ASGIApp:
    async with backend_of(request).bodies.reading(request, kind) as body:
        if body.stream and not body.can_stream:
            raise RejectedRequest("this endpoint does not stream", field="stream")
        image = None
        if body.image_url is not None:
            image = await bodies.decoded(body.image_url, "image_url")
            body.image_url = None  # the image has taken its memory's place
        task, options = body.task(), options_of(request, body.model)
        return await respond(request, image, task, options, _Form(), streaming=body.stream)


class _Form(streams.WireForm):
    def answer(self, result: results.Result, _tokens: Iterable[results.Token] | None) -> Answer:
        return answer_of(result)

    def frames(self, event: results.Event) -> Iterator[bytes]:
        if (document := event_of(event)) is not None:
            yield streams.frame(msgspec.json.encode(document))
