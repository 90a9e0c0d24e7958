"""The skills: how the messages of each become a task, and a result becomes its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message
from legato.v1 import inference_pb2, task_pb2
from legato_engine.core.results import (
    CaptionResult,
    DetectResult,
    PointResult,
    QueryResult,
    SegmentResult,
    TaskResult,
)
from legato_engine.core.task_specs import (
    CaptionLength,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    TaskSpec,
)
from legato_engine.errors import InvalidField

from legato_service.convert import chat, fields, pieces

MAX_OBJECT = 1_024  # characters

_LENGTHS = {
    task_pb2.CAPTION_LENGTH_UNSPECIFIED: CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_SHORT: CaptionLength.SHORT,
    task_pb2.CAPTION_LENGTH_NORMAL: CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_LONG: CaptionLength.LONG,
}

ResultT = TypeVar("ResultT", bound=TaskResult)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclasses.dataclass(frozen=True, slots=True)
class Skill(Generic[ResultT, ResponseT]):
    """The conversions of one skill, named as in `core`.

    `task` takes the task's message or the request of the skill's own call, and the path of its
    fields; `fill` fills the result's message or the response of that call. Both have the fields
    that this module reads and writes.
    """

    name: str
    task: Callable[[Any, str], TaskSpec]
    result: type[ResultT]
    response: Callable[[], ResponseT]
    fill: Callable[[Any, ResultT], None]

    def answer(self, result: ResultT) -> ResponseT:
        """Without its info."""
        response = self.response()
        self.fill(response, result)
        return response


# ---------------------------------------------------------------- query

Query: TypeAlias = task_pb2.QueryTask | inference_pb2.QueryRequest


def _query(message: Query, path: str) -> QueryTask:
    refs = fields.refs(message.spatial_refs, path)
    if not message.messages:
        field = f"{path}question"
        fields.check_text_size([message.question], field)
        question = fields.text(message.question, field, fields.MAX_TEXT_BYTES)
        return QueryTask(question=question, reasoning=message.reasoning, spatial_refs=refs)
    if message.question:
        raise InvalidField("a question or messages, not both", field=f"{path}question")
    conversation = chat.conversation(message.messages, f"{path}messages")
    return QueryTask(
        question=conversation.question,
        reasoning=message.reasoning,
        spatial_refs=refs,
        system=conversation.system,
        history=conversation.history,
        shows_image=conversation.shows_image,
    )


def _fill_query(
    message: task_pb2.QueryResult | inference_pb2.QueryResponse, result: QueryResult
) -> None:
    message.answer = result.answer
    if result.reasoning is not None:
        message.reasoning.text = result.reasoning
        message.reasoning.grounding.extend(map(pieces.grounding, result.grounding))


QUERY = Skill("query", _query, QueryResult, inference_pb2.QueryResponse, _fill_query)


# ---------------------------------------------------------------- caption

Caption: TypeAlias = task_pb2.CaptionTask | inference_pb2.CaptionRequest


def _caption(message: Caption, path: str) -> CaptionTask:
    if message.length not in _LENGTHS:
        raise InvalidField(f"{message.length} is not a caption length", field=f"{path}length")
    return CaptionTask(length=_LENGTHS[message.length])


def _fill_caption(
    message: task_pb2.CaptionResult | inference_pb2.CaptionResponse, result: CaptionResult
) -> None:
    message.caption = result.caption


CAPTION = Skill("caption", _caption, CaptionResult, inference_pb2.CaptionResponse, _fill_caption)


# ---------------------------------------------------------------- detect

Detect: TypeAlias = task_pb2.DetectTask | inference_pb2.DetectRequest


def _detect(message: Detect, path: str) -> DetectTask:
    return DetectTask(
        object=fields.text(message.object, f"{path}object", MAX_OBJECT),
        max_objects=fields.max_objects(message),
        min_confidence=message.min_confidence,
        order=fields.order(message, path),
    )


def _fill_detect(
    message: task_pb2.DetectResult | inference_pb2.DetectResponse, result: DetectResult
) -> None:
    objects = message.objects
    for value in result.objects:
        pieces.fill_object(objects.add(), value)


DETECT = Skill("detect", _detect, DetectResult, inference_pb2.DetectResponse, _fill_detect)


# ---------------------------------------------------------------- point

Point: TypeAlias = task_pb2.PointTask | inference_pb2.PointRequest


def _point(message: Point, path: str) -> PointTask:
    return PointTask(
        object=fields.text(message.object, f"{path}object", MAX_OBJECT),
        max_objects=fields.max_objects(message),
        spatial_refs=fields.refs(message.spatial_refs, path),
        min_confidence=message.min_confidence,
        order=fields.order(message, path),
    )


def _fill_point(
    message: task_pb2.PointResult | inference_pb2.PointResponse, result: PointResult
) -> None:
    points = message.points
    for value in result.points:
        pieces.fill_pointed(points.add(), value)


POINT = Skill("point", _point, PointResult, inference_pb2.PointResponse, _fill_point)


# ---------------------------------------------------------------- segment

Segment: TypeAlias = task_pb2.SegmentTask | inference_pb2.SegmentRequest


def _segment(message: Segment, path: str) -> SegmentTask:
    return SegmentTask(
        object=fields.text(message.object, f"{path}object", MAX_OBJECT),
        spatial_refs=fields.refs(message.spatial_refs, path),
    )


def _fill_segment(
    message: task_pb2.SegmentResult | inference_pb2.SegmentResponse, result: SegmentResult
) -> None:
    message.segments.extend(map(pieces.outline, result.segments))


SEGMENT = Skill("segment", _segment, SegmentResult, inference_pb2.SegmentResponse, _fill_segment)


# ---------------------------------------------------------------- the table

AnySkill: TypeAlias = Skill[Any, Any]

SKILLS: tuple[AnySkill, ...] = (QUERY, CAPTION, DETECT, POINT, SEGMENT)
BY_NAME: Mapping[str, AnySkill] = {skill.name: skill for skill in SKILLS}
"""By the field of the contract's Task and TaskResult."""
BY_RESULT: Mapping[type, AnySkill] = {skill.result: skill for skill in SKILLS}
