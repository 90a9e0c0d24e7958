"""Skills: values and messages of each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from google.protobuf.message import Message as ProtoMessage
from legato.v1 import inference_pb2, task_pb2

from legato_client._images.sources import ImageInput
from legato_client._proto import pieces
from legato_client._types import results, tasks


def images_of(
    task: tasks.Task, images: tasks.Images | None
) -> Sequence[ImageInput | tasks.ClipFrame]:
    """Return the images of a call: those that messages show, or those beside the task.

    Raises:
        ValueError: there are both, or several for a task other than a query.
    """
    shown = shown_images(task)
    if shown and images is not None:
        raise ValueError("images in the messages or beside them, not both")
    if isinstance(images, list | tuple):
        shown = list(images)
    elif images is not None:
        shown = [cast("ImageInput", images)]
    if len(shown) > 1 and not isinstance(task, tasks.QueryTask):
        raise ValueError(f"{of(task).name} takes one image, got {len(shown)}")
    return shown


def _to_message(message: tasks.Message) -> task_pb2.ChatMessage:
    parts = [
        task_pb2.ChatPart(text=part)
        if isinstance(part, str)
        else task_pb2.ChatPart(image=task_pb2.ImagePart())
        for part in _parts(message)
    ]
    role = pieces.enum_number(task_pb2.ChatRole.DESCRIPTOR, "a message's role", message.role)
    return task_pb2.ChatMessage(role=role, parts=parts)


def shown_images(task: tasks.Task) -> list[ImageInput | tasks.ClipFrame]:
    """Return the images inside the messages of a task."""
    if not isinstance(task, tasks.QueryTask):
        return []
    parts = [part for message in task.messages for part in _parts(message)]
    return [part for part in parts if not isinstance(part, str)]


def _parts(message: tasks.Message) -> Sequence[str | ImageInput | tasks.ClipFrame]:
    return (message.content,) if isinstance(message.content, str) else message.content


# ---------------------------------------------------------------- skills

TaskT = TypeVar("TaskT", bound=tasks.Task)
ResultT = TypeVar("ResultT", bound=results.Result)


@dataclasses.dataclass(frozen=True, slots=True)
class Skill(Generic[TaskT, ResultT]):
    """Description of a skill; other differences follow from the fields of its values.

    `name` is its field in the contract's Task and TaskResult, its command, and its call. The
    task's own message and the call's request have the fields of `task`, and the result's message
    and the call's response those of `result`.
    """

    name: str
    help: str
    task: type[TaskT]
    result: type[ResultT]
    subject: str
    """Task field that a command-line word sets."""
    choices: tuple[str, ...] = ()
    """Allowed subjects; empty: any."""
    places: Literal["", "boxes", "points"] = ""
    """Kind of places in its result; an outline has a box."""

    @property
    def request(self) -> type[ProtoMessage]:
        kind: type[ProtoMessage] = getattr(inference_pb2, f"{self.name.capitalize()}Request")
        return kind

    @property
    def response(self) -> type[ProtoMessage]:
        kind: type[ProtoMessage] = getattr(inference_pb2, f"{self.name.capitalize()}Response")
        return kind

    def read(self, message: ProtoMessage, info: results.ResponseInfo, task_id: str = "") -> ResultT:
        """Convert the result's message, or the call's response."""
        return pieces.read(self.result, message, info=info, task_id=task_id)

    @property
    def usage(self) -> str:
        """Return the task's short form: "detect:OBJECT"."""
        if self.choices:
            return f"{self.name}[:{'|'.join(self.choices)}]"
        return f"{self.name}:{self.subject.upper()}"

    def takes(self, field: str) -> bool:
        return field in self.task.__dataclass_fields__

    def make(self, subject: str, sampling: tasks.Sampling, **fields: Any) -> TaskT:
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


DETECT = Skill(
    "detect",
    "box every instance of an object",
    tasks.DetectTask,
    results.DetectResult,
    "object",
    places="boxes",
)
POINT = Skill(
    "point",
    "point at every instance of an object",
    tasks.PointTask,
    results.PointResult,
    "object",
    places="points",
)
SEGMENT = Skill(
    "segment",
    "outline an object",
    tasks.SegmentTask,
    results.SegmentResult,
    "object",
    places="boxes",
)
CAPTION = Skill(
    "caption",
    "describe the image",
    tasks.CaptionTask,
    results.CaptionResult,
    "length",
    choices=get_args(tasks.CaptionLength),
)
QUERY = Skill(
    "query",
    "answer a question, with or without an image",
    tasks.QueryTask,
    results.QueryResult,
    "question",
)

AnySkill = Skill[Any, Any]

SKILLS: tuple[AnySkill, ...] = (DETECT, POINT, SEGMENT, CAPTION, QUERY)
BY_NAME: Mapping[str, AnySkill] = {skill.name: skill for skill in SKILLS}
_BY_VALUE: Mapping[type, AnySkill] = {
    cls: skill for skill in SKILLS for cls in (skill.task, skill.result)
}


def of(value: tasks.Task | results.Result) -> AnySkill:
    return _BY_VALUE[type(value)]


# ---------------------------------------------------------------- tasks as messages


def write(task: tasks.Task, message: ProtoMessage) -> None:
    """Fill the task's own message, the request of its call, or the contract's Task.

    Raises ValueError for a word that the contract lacks.
    """
    pieces.fill(message, task, _CONVERTERS)


def to_sampling(sampling: tasks.Sampling) -> task_pb2.Sampling | None:
    """Convert sampling parameters; defaults are no message at all."""
    message = task_pb2.Sampling()
    pieces.fill(message, sampling)
    return message if message.ListFields() else None


def _to_order(order: str) -> int:
    number: int = pieces.enum_number(task_pb2.ObjectOrder.DESCRIPTOR, "order", order)
    return 0 if number == task_pb2.OBJECT_ORDER_MODEL else number  # the default is not sent


def to_response_format(wanted: tasks.ResponseFormat) -> task_pb2.ResponseFormat:
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


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "length": partial(pieces.enum_number, task_pb2.CaptionLength.DESCRIPTOR, "caption length"),
    "order": _to_order,
    "tracking": lambda each: task_pb2.Tracking(max_unseen=pieces.duration(each.max_unseen)),
    "spatial_refs": pieces.to_refs,
    "messages": lambda messages: [_to_message(each) for each in messages],
    "response_format": to_response_format,
    "sampling": to_sampling,
}
"""Converters of a task's fields that are not the contract's own values."""
