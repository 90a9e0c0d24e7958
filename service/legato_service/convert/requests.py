"""Protobuf requests as `core` values. Pure; every rule that needs no image and no model is here.

Each function raises `InvalidField` naming the offending field by its path from the request message.
`path` is the prefix of that path: empty, or `task.detect.` and the like.

Of most requests most is absent, and to ask a message for a part that it has not costs as much as
for one that it has. So messages are read once, into `Fields`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from legato.v1 import geometry_pb2, media_pb2, task_pb2
from legato_engine import core
from legato_engine.errors import InvalidField, PromptTooLong

from legato_service.convert import chat

MAX_QUESTION = 32_768  # characters: far above any context, low enough to copy without a thought
MAX_OBJECT = 1_024
MAX_REFS = 64
MAX_STOPS, MAX_STOP = 8, 64
MAX_TASKS, MAX_TASK_ID = 32, 64
MIN_HEARTBEAT = 0.1  # seconds; shorter ones are raised to it

_ALL_DEFAULTS = core.SamplingParams()
_LENGTHS = {
    task_pb2.CAPTION_LENGTH_UNSPECIFIED: core.CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_SHORT: core.CaptionLength.SHORT,
    task_pb2.CAPTION_LENGTH_NORMAL: core.CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_LONG: core.CaptionLength.LONG,
}


Fields: TypeAlias = Mapping[str, Any]
"""What a message holds, by name. Fields without presence are there where they differ from zero."""


class _Names(dict[FieldDescriptor, str]):
    """Names of fields, which protobuf makes anew whenever it is asked."""

    def __missing__(self, field: FieldDescriptor) -> str:
        name = self[field] = field.name
        return name


_names = _Names()


def fields(message: Message | None) -> Fields:
    """All of a message, nothing of None."""
    found: dict[str, Any] = {}
    if message is not None:
        for field, value in message.ListFields():
            found[_names[field]] = value
    return found


def heartbeat(options: Fields) -> float:
    """Seconds of silence before a heartbeat, infinite for no heartbeats."""
    interval = options.get("heartbeat_interval")
    if interval is None:
        return math.inf
    seconds: float = interval.ToNanoseconds() / 1e9
    if seconds <= 0:
        raise InvalidField("must be positive", field="options.heartbeat_interval")
    return max(seconds, MIN_HEARTBEAT)


def image(message: media_pb2.Image | None, spec: core.TaskSpec, path: str = "") -> bool:
    """Whether there is a picture; checks that there is one where the task needs it."""
    if message is not None and message.WhichOneof("source") is not None:
        return True
    if not isinstance(spec, core.QueryTask):
        raise InvalidField("this task needs a picture", field="image")
    if spec.spatial_refs:
        raise InvalidField("places need a picture", field=f"{path}spatial_refs")
    if spec.shows_image:
        raise InvalidField("a message shows a picture, and there is none", field="image")
    return False


def request(
    key: core.RequestKey,
    spec: core.TaskSpec,
    sampling: core.SamplingParams,
    options: Fields,
    *,
    deltas: bool = True,
    progress: bool = True,
) -> core.Request:
    """The request, still without its image and its deadline.

    `deltas` and `progress` are for who reads them.
    """
    logprobs = "top_logprobs" in options
    return core.Request(
        request_id=key,
        task=spec,
        sampling=sampling,
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
        cache_image=options.get("cache_image", True),
        return_tokens=logprobs or options.get("return_tokens", False),
        logprobs=logprobs,
        deltas=deltas,
        progress=progress,
    )


def query(asked: Fields, path: str = "") -> core.QueryTask:
    """Answer a question, or the last one of a conversation."""
    refs = _refs(asked, path)
    reasoning = asked.get("reasoning", False)
    messages = asked.get("messages")
    if messages is None:
        question = _text(asked, "question", path, MAX_QUESTION)
        return core.QueryTask(question=question, reasoning=reasoning, spatial_refs=refs)
    if "question" in asked:
        raise InvalidField("a question or messages, not both", field=f"{path}question")
    said = chat.conversation(messages, f"{path}messages")
    return core.QueryTask(reasoning=reasoning, spatial_refs=refs, **said._asdict())


def caption(asked: Fields, path: str = "") -> core.CaptionTask:
    """Describe the picture."""
    length = asked.get("length", task_pb2.CAPTION_LENGTH_UNSPECIFIED)
    if length not in _LENGTHS:
        raise InvalidField(f"{length} is not a caption length", field=f"{path}length")
    return core.CaptionTask(length=_LENGTHS[length])


def detect(asked: Fields, path: str = "") -> core.DetectTask:
    """Box every instance."""
    return core.DetectTask(
        object=_text(asked, "object", path, MAX_OBJECT),
        max_objects=_at_least_one(asked, "max_objects", path),
    )


def point(asked: Fields, path: str = "") -> core.PointTask:
    """Point at every instance."""
    return core.PointTask(
        object=_text(asked, "object", path, MAX_OBJECT),
        max_objects=_at_least_one(asked, "max_objects", path),
        spatial_refs=_refs(asked, path),
    )


def segment(asked: Fields, path: str = "") -> core.SegmentTask:
    """Outline an instance."""
    return core.SegmentTask(
        object=_text(asked, "object", path, MAX_OBJECT),
        spatial_refs=_refs(asked, path),
    )


_KINDS: dict[str, Callable[[Fields, str], core.TaskSpec]] = {
    "query": query,
    "caption": caption,
    "detect": detect,
    "point": point,
    "segment": segment,
}


def task(message: task_pb2.Task, path: str) -> core.TaskSpec:
    """Any one skill; `path` is the task's own, without a dot at its end."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidField("a task needs its kind", field=path)
    if len(message.task_id) > MAX_TASK_ID:
        raise InvalidField(f"at most {MAX_TASK_ID} characters", field=f"{path}.task_id")
    return _KINDS[kind](fields(getattr(message, kind)), f"{path}.{kind}.")


def tasks(
    messages: Sequence[task_pb2.Task], field: str = "tasks", *, least: int = 1
) -> list[core.TaskSpec]:
    """The tasks of one request: `least` to 32, their ids distinct."""
    if not least <= len(messages) <= MAX_TASKS:
        raise InvalidField(
            f"{least} to {MAX_TASKS} tasks", field=field, limit=MAX_TASKS, actual=len(messages)
        )
    seen: set[str] = set()
    for index, message in enumerate(messages):
        if message.task_id and message.task_id in seen:
            raise InvalidField("task ids must differ", field=f"{field}[{index}].task_id")
        seen.add(message.task_id)
    return [task(message, f"{field}[{index}]") for index, message in enumerate(messages)]


def sampling(message: task_pb2.Sampling | None, path: str = "") -> core.SamplingParams:
    """How to sample; absent fields stay None."""
    if message is None:
        return _ALL_DEFAULTS
    given = fields(message)
    at = f"{path}sampling."
    temperature, top_p, stop = given.get("temperature"), given.get("top_p"), given.get("stop", ())
    if temperature is not None and not 0 <= temperature < math.inf:
        raise InvalidField("must be finite and at least 0", field=f"{at}temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidField("must be in (0, 1]", field=f"{at}top_p")
    if len(stop) > MAX_STOPS:
        raise InvalidField(f"at most {MAX_STOPS} stop strings", field=f"{at}stop")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP:
            raise InvalidField(f"1 to {MAX_STOP} characters", field=f"{at}stop[{index}]")
    return core.SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=given.get("top_k"),
        max_tokens=_at_least_one(given, "max_tokens", at),
        seed=given.get("seed"),
        stop=tuple(stop),
    )


def _text(given: Fields, name: str, path: str, limit: int) -> str:
    value: str = given.get(name, "")
    if not value.strip():
        raise InvalidField("must not be empty", field=f"{path}{name}")
    if len(value) > limit:
        raise PromptTooLong(
            f"{len(value)} characters, the limit is {limit}",
            field=f"{path}{name}",
            limit=limit,
            actual=len(value),
        )
    return value


def _at_least_one(given: Fields, name: str, path: str) -> int | None:
    value: int | None = given.get(name)
    if value is not None and value < 1:
        raise InvalidField("must be at least 1", field=f"{path}{name}")
    return value


def _refs(given: Fields, path: str) -> tuple[core.SpatialRef, ...]:
    messages = given.get("spatial_refs")
    if messages is None:
        return ()
    if len(messages) > MAX_REFS:
        raise InvalidField(f"at most {MAX_REFS} places", field=f"{path}spatial_refs")
    return tuple(
        _ref(message, f"{path}spatial_refs[{index}]") for index, message in enumerate(messages)
    )


def _ref(message: geometry_pb2.SpatialRef, field: str) -> core.SpatialRef:
    kind = message.WhichOneof("ref")
    if kind is None:
        raise InvalidField("a place is a point or a box", field=field)
    if kind == "point":
        spot = message.point
        _inside((spot.x, spot.y), f"{field}.point")
        return core.Point(x=spot.x, y=spot.y)
    box = message.box
    _inside((box.x_min, box.y_min, box.x_max, box.y_max), f"{field}.box")
    if box.x_min > box.x_max or box.y_min > box.y_max:
        raise InvalidField("edges are swapped", field=f"{field}.box")
    return core.Box(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)


def _inside(values: tuple[float, ...], field: str) -> None:
    if not all(0 <= value <= 1 for value in values):  # NaN compares false, and so is refused
        raise InvalidField("coordinates are finite and in [0, 1]", field=field)
