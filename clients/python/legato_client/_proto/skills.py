"""Skills: values and messages of each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from google.protobuf.message import Message as ProtoMessage
from legato.v1 import inference_pb2, task_pb2

from legato_client._images.sources import ImageInput
from legato_client._proto import pieces
from legato_client._types import results
from legato_client._types.tasks import (
    CaptionLength,
    CaptionTask,
    ClipFrame,
    DetectTask,
    Images,
    Message,
    PointTask,
    QueryTask,
    ResponseFormat,
    Sampling,
    SegmentTask,
    Task,
)

_ROLES: dict[str, task_pb2.ChatRole.ValueType] = {
    "system": task_pb2.CHAT_ROLE_SYSTEM,
    "user": task_pb2.CHAT_ROLE_USER,
    "assistant": task_pb2.CHAT_ROLE_ASSISTANT,
}


def images_of(task: Task, images: Images | None) -> Sequence[ImageInput | ClipFrame]:
    """Return the images of a call: those that messages show, or those beside the task.

    Raises:
        ValueError: there are both, or several for a task other than a query.
    """
    shown = _shown(task)
    if shown and images is not None:
        raise ValueError("images in the messages or beside them, not both")
    if isinstance(images, list | tuple):
        shown = list(images)
    elif images is not None:
        shown = [cast("ImageInput", images)]
    if len(shown) > 1 and not isinstance(task, QueryTask):
        raise ValueError(f"{of(task).name} takes one image, got {len(shown)}")
    return shown


def refuse_images(task: Task) -> None:
    """Raise ValueError for an image in a message: several tasks share the call's image."""
    if _shown(task):
        raise ValueError("this call is given its image beside the tasks, not inside a message")


def to_messages(messages: Iterable[Message]) -> list[task_pb2.ChatMessage]:
    """Convert messages. Raises ValueError for an unknown role."""
    return [_to_message(message) for message in messages]


def _to_message(message: Message) -> task_pb2.ChatMessage:
    if message.role not in _ROLES:
        raise ValueError(f"a role is one of {sorted(_ROLES)}, got {message.role!r}")
    parts = [
        task_pb2.ChatPart(text=part)
        if isinstance(part, str)
        else task_pb2.ChatPart(image=task_pb2.ImagePart())
        for part in _parts(message)
    ]
    return task_pb2.ChatMessage(role=_ROLES[message.role], parts=parts)


def _shown(task: Task) -> list[ImageInput | ClipFrame]:
    if not isinstance(task, QueryTask):
        return []
    parts = [part for message in task.messages for part in _parts(message)]
    return [part for part in parts if not isinstance(part, str)]


def _parts(message: Message) -> Sequence[str | ImageInput | ClipFrame]:
    return (message.content,) if isinstance(message.content, str) else message.content


# ---------------------------------------------------------------- skills

TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT", bound=results.Result)

_LENGTHS: dict[str, task_pb2.CaptionLength.ValueType] = {
    "short": task_pb2.CAPTION_LENGTH_SHORT,
    "normal": task_pb2.CAPTION_LENGTH_NORMAL,
    "long": task_pb2.CAPTION_LENGTH_LONG,
}
_ORDERS: dict[str, task_pb2.ObjectOrder.ValueType] = {
    "model": task_pb2.OBJECT_ORDER_UNSPECIFIED,
    "confidence": task_pb2.OBJECT_ORDER_CONFIDENCE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Skill(Generic[TaskT, ResultT]):
    """Description of a skill; other differences follow from the fields of its values.

    `name` is its field in the contract's Task and TaskResult, and its command. `write` fills the
    task's own message or the request of the call that is named after the skill: both have these
    fields. So have the result's message and the call's response, which `read` takes.
    """

    name: str
    help: str
    task: type[TaskT]
    result: type[ResultT]
    request: type[ProtoMessage]
    response: type[ProtoMessage]
    write: Callable[[TaskT, Any], None]
    read: Callable[[Any, results.ResponseInfo, str], ResultT]
    subject: str
    """Task field that a command-line word sets."""
    choices: tuple[str, ...] = ()
    """Allowed subjects; empty: any."""
    places: Literal["", "boxes", "points"] = ""
    """Kind of places in its result; an outline has a box."""

    @property
    def usage(self) -> str:
        """Return the task's short form: "detect:OBJECT"."""
        if self.choices:
            return f"{self.name}[:{'|'.join(self.choices)}]"
        return f"{self.name}:{self.subject.upper()}"

    def takes(self, field: str) -> bool:
        """Return whether its task has such a field."""
        return field in self.task.__dataclass_fields__

    def make(self, subject: str, sampling: Sampling, **fields: Any) -> TaskT:
        """Build the task about `subject`, with those of `fields` that it has.

        ValueError for a subject that it cannot have.
        """
        text = subject.strip()
        if self.choices and text and text not in self.choices:
            raise ValueError(f"a {self.name} is one of {', '.join(self.choices)}, not {text!r}")
        if not self.choices and not text:
            raise ValueError(f"{self.name} needs a text: {self.name}:TEXT")
        given = {name: value for name, value in fields.items() if self.takes(name)}
        if text:
            given[self.subject] = text
        make = cast("Callable[..., TaskT]", self.task)
        return make(**given, sampling=sampling)


def _write_object(task: DetectTask | PointTask | SegmentTask, message: Any) -> None:
    message.object = task.object


def _write_limits(task: DetectTask | PointTask, message: Any) -> None:
    if task.max_objects is not None:
        message.max_objects = task.max_objects
    if task.min_confidence is not None:
        message.min_confidence = task.min_confidence
    if task.order not in _ORDERS:
        raise ValueError(f"an order is one of {sorted(_ORDERS)}, got {task.order!r}")
    message.order = _ORDERS[task.order]


# ---------------------------------------------------------------- detect


def _write_detect(task: DetectTask, message: Any) -> None:
    """Write the task; only a session's task is tracked."""
    _write_object(task, message)
    _write_limits(task, message)
    if task.tracking is not None and isinstance(message, task_pb2.DetectTask):
        message.tracking.SetInParent()
        if task.tracking.max_unseen is not None:
            message.tracking.max_unseen.CopyFrom(pieces.duration(task.tracking.max_unseen))


def _read_detect(
    message: task_pb2.DetectResult | inference_pb2.DetectResponse,
    info: results.ResponseInfo,
    task_id: str = "",
) -> results.DetectResult:
    return results.DetectResult(tuple(map(pieces.detection, message.objects)), info, task_id)


DETECT = Skill(
    name="detect",
    help="box every instance of an object",
    task=DetectTask,
    result=results.DetectResult,
    request=inference_pb2.DetectRequest,
    response=inference_pb2.DetectResponse,
    write=_write_detect,
    read=_read_detect,
    subject="object",
    places="boxes",
)


# ---------------------------------------------------------------- point


def _write_point(task: PointTask, message: Any) -> None:
    _write_object(task, message)
    _write_limits(task, message)
    message.spatial_refs.extend(pieces.to_refs(task.spatial_refs))


def _read_point(
    message: task_pb2.PointResult | inference_pb2.PointResponse,
    info: results.ResponseInfo,
    task_id: str = "",
) -> results.PointResult:
    return results.PointResult(tuple(map(pieces.pointed, message.points)), info, task_id)


POINT = Skill(
    name="point",
    help="point at every instance of an object",
    task=PointTask,
    result=results.PointResult,
    request=inference_pb2.PointRequest,
    response=inference_pb2.PointResponse,
    write=_write_point,
    read=_read_point,
    subject="object",
    places="points",
)


# ---------------------------------------------------------------- segment


def _write_segment(task: SegmentTask, message: Any) -> None:
    _write_object(task, message)
    message.spatial_refs.extend(pieces.to_refs(task.spatial_refs))


def _read_segment(
    message: task_pb2.SegmentResult | inference_pb2.SegmentResponse,
    info: results.ResponseInfo,
    task_id: str = "",
) -> results.SegmentResult:
    return results.SegmentResult(tuple(map(pieces.outline, message.segments)), info, task_id)


SEGMENT = Skill(
    name="segment",
    help="outline an object",
    task=SegmentTask,
    result=results.SegmentResult,
    request=inference_pb2.SegmentRequest,
    response=inference_pb2.SegmentResponse,
    write=_write_segment,
    read=_read_segment,
    subject="object",
    places="boxes",
)


# ---------------------------------------------------------------- caption


def _write_caption(task: CaptionTask, message: Any) -> None:
    if task.length not in _LENGTHS:
        raise ValueError(f"caption length must be one of {sorted(_LENGTHS)}, got {task.length!r}")
    message.length = _LENGTHS[task.length]


def _read_caption(
    message: task_pb2.CaptionResult | inference_pb2.CaptionResponse,
    info: results.ResponseInfo,
    task_id: str = "",
) -> results.CaptionResult:
    return results.CaptionResult(message.caption, info, task_id)


CAPTION = Skill(
    name="caption",
    help="describe the image",
    task=CaptionTask,
    result=results.CaptionResult,
    request=inference_pb2.CaptionRequest,
    response=inference_pb2.CaptionResponse,
    write=_write_caption,
    read=_read_caption,
    subject="length",
    choices=get_args(CaptionLength),
)


# ---------------------------------------------------------------- query


def _write_query(task: QueryTask, message: Any) -> None:
    message.question = task.question
    message.reasoning = task.reasoning
    message.spatial_refs.extend(pieces.to_refs(task.spatial_refs))
    message.messages.extend(to_messages(task.messages))
    if task.response_format is not None:
        message.response_format.CopyFrom(to_response_format(task.response_format))


def to_response_format(wanted: ResponseFormat) -> task_pb2.ResponseFormat:
    """Convert a format. Raises ValueError unless exactly one of its fields is set."""
    schema = wanted.json_schema
    given = {
        "json_schema": schema if isinstance(schema, str | None) else json.dumps(schema),
        "regex": wanted.regex or None,
        "choices": task_pb2.Choices(texts=wanted.choices) if wanted.choices else None,
        "grammar": wanted.grammar or None,
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if len(fields) != 1:
        raise ValueError(
            "response_format: set one of json_schema, regex, choices and grammar, "
            f"not {' and '.join(fields) or 'none'}"
        )
    return task_pb2.ResponseFormat(**fields)


def _read_query(
    message: task_pb2.QueryResult | inference_pb2.QueryResponse,
    info: results.ResponseInfo,
    task_id: str = "",
) -> results.QueryResult:
    thought = pieces.reasoning(message.reasoning) if message.HasField("reasoning") else None
    return results.QueryResult(message.answer, thought, info, task_id)


QUERY = Skill(
    name="query",
    help="answer a question, with or without an image",
    task=QueryTask,
    result=results.QueryResult,
    request=inference_pb2.QueryRequest,
    response=inference_pb2.QueryResponse,
    write=_write_query,
    read=_read_query,
    subject="question",
)


# ---------------------------------------------------------------- the table

AnySkill = Skill[Any, Any]

SKILLS: tuple[AnySkill, ...] = (DETECT, POINT, SEGMENT, CAPTION, QUERY)
BY_NAME: Mapping[str, AnySkill] = {skill.name: skill for skill in SKILLS}
_BY_VALUE: Mapping[type, AnySkill] = {
    cls: skill for skill in SKILLS for cls in (skill.task, skill.result)
}


def of(value: Task | results.Result) -> AnySkill:
    """Return the skill of a task or of a result."""
    return _BY_VALUE[type(value)]
