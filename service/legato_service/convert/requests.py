"""Protobuf requests to `core` values: every rule that needs neither the image nor the model.

Functions raise `InvalidField` with the path of the field; `path` is its prefix, like
`task.detect.`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from legato.v1 import geometry_pb2, inference_pb2, media_pb2, task_pb2
from legato_engine import core
from legato_engine.errors import InvalidField, PromptTooLong

from legato_service.convert import chat

MAX_QUESTION = 32_768  # characters
MAX_OBJECT = 1_024
MAX_REFS = 64
MAX_STOPS, MAX_STOP = 8, 64
MAX_TOP_LOGPROBS = 20
MAX_TASKS, MAX_TASK_ID = 32, 64
MIN_HEARTBEAT = 0.1  # seconds
DEFAULT_UNSEEN, MAX_UNSEEN = 2.0, 60.0  # seconds

_ALL_DEFAULTS = core.SamplingParams()
_LENGTHS = {
    task_pb2.CAPTION_LENGTH_UNSPECIFIED: core.CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_SHORT: core.CaptionLength.SHORT,
    task_pb2.CAPTION_LENGTH_NORMAL: core.CaptionLength.NORMAL,
    task_pb2.CAPTION_LENGTH_LONG: core.CaptionLength.LONG,
}
_ORDERS = {
    task_pb2.OBJECT_ORDER_UNSPECIFIED: core.ObjectOrder.MODEL,
    task_pb2.OBJECT_ORDER_MODEL: core.ObjectOrder.MODEL,
    task_pb2.OBJECT_ORDER_CONFIDENCE: core.ObjectOrder.CONFIDENCE,
}


Query: TypeAlias = task_pb2.QueryTask | inference_pb2.QueryRequest
Caption: TypeAlias = task_pb2.CaptionTask | inference_pb2.CaptionRequest
Detect: TypeAlias = task_pb2.DetectTask | inference_pb2.DetectRequest
Point: TypeAlias = task_pb2.PointTask | inference_pb2.PointRequest
Segment: TypeAlias = task_pb2.SegmentTask | inference_pb2.SegmentRequest


def heartbeat(options: inference_pb2.RequestOptions) -> float:
    """Seconds of silence, infinity without heartbeats."""
    if not options.HasField("heartbeat_interval"):
        return math.inf
    seconds = options.heartbeat_interval.ToNanoseconds() / 1e9
    if seconds <= 0:
        raise InvalidField("must be positive", field="options.heartbeat_interval")
    return max(seconds, MIN_HEARTBEAT)


def check_image(message: media_pb2.Image, task: core.TaskSpec, path: str = "") -> bool:
    """Return whether the request has an image; refuse it when the task needs one."""
    if message.WhichOneof("source") is not None:
        return True
    if not isinstance(task, core.QueryTask):
        raise InvalidField("this task needs an image", field="image")
    if task.spatial_refs:
        raise InvalidField("spatial references need an image", field=f"{path}spatial_refs")
    if task.shows_image:
        raise InvalidField("a message refers to an image, but the request has none", field="image")
    return False


def request(
    key: core.RequestKey,
    task: core.TaskSpec,
    sampling: core.SamplingParams,
    options: inference_pb2.RequestOptions,
    *,
    deltas: bool = True,
    progress: bool = True,
) -> core.Request:
    """The image and the deadline follow later."""
    logprobs = options.HasField("top_logprobs")
    if options.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidField(
            f"at most {MAX_TOP_LOGPROBS} alternatives",
            field="options.top_logprobs",
            limit=MAX_TOP_LOGPROBS,
            actual=options.top_logprobs,
        )
    return core.Request(
        request_id=key,
        task=task,
        sampling=sampling,
        model=options.model,
        adapter=options.adapter,
        cache_image=options.cache_image if options.HasField("cache_image") else True,
        return_tokens=logprobs or options.return_tokens,
        logprobs=logprobs,
        top_logprobs=options.top_logprobs,
        deltas=deltas,
        progress=progress,
    )


def query(message: Query, path: str = "") -> core.QueryTask:
    refs = _refs(message.spatial_refs, path)
    if not message.messages:
        question = _text(message.question, f"{path}question", MAX_QUESTION)
        return core.QueryTask(question=question, reasoning=message.reasoning, spatial_refs=refs)
    if message.question:
        raise InvalidField("a question or messages, not both", field=f"{path}question")
    conversation = chat.conversation(message.messages, f"{path}messages")
    return core.QueryTask(
        question=conversation.question,
        reasoning=message.reasoning,
        spatial_refs=refs,
        system=conversation.system,
        history=conversation.history,
        shows_image=conversation.shows_image,
    )


def caption(message: Caption, path: str = "") -> core.CaptionTask:
    if message.length not in _LENGTHS:
        raise InvalidField(f"{message.length} is not a caption length", field=f"{path}length")
    return core.CaptionTask(length=_LENGTHS[message.length])


def detect(message: Detect, path: str = "") -> core.DetectTask:
    return core.DetectTask(
        object=_text(message.object, f"{path}object", MAX_OBJECT),
        max_objects=_max_objects(message, path),
        min_confidence=_min_confidence(message, path),
        order=_order(message, path),
    )


def point(message: Point, path: str = "") -> core.PointTask:
    return core.PointTask(
        object=_text(message.object, f"{path}object", MAX_OBJECT),
        max_objects=_max_objects(message, path),
        spatial_refs=_refs(message.spatial_refs, path),
        min_confidence=_min_confidence(message, path),
        order=_order(message, path),
    )


def segment(message: Segment, path: str = "") -> core.SegmentTask:
    return core.SegmentTask(
        object=_text(message.object, f"{path}object", MAX_OBJECT),
        spatial_refs=_refs(message.spatial_refs, path),
    )


def tracking(message: task_pb2.Tracking, path: str) -> float:
    """Seconds for which a track lives unseen."""
    if not message.HasField("max_unseen"):
        return DEFAULT_UNSEEN
    seconds = message.max_unseen.ToNanoseconds() / 1e9
    if not 0 <= seconds <= MAX_UNSEEN:
        raise InvalidField(
            f"must be 0 to {MAX_UNSEEN:g} s", field=f"{path}max_unseen", limit=MAX_UNSEEN
        )
    return seconds


def task(message: task_pb2.Task, path: str, *, standing: bool = False) -> core.TaskSpec:
    """`path` has no dot at its end; `standing`: it is done with every frame of a session."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidField("a task needs its kind", field=path)
    if len(message.task_id) > MAX_TASK_ID:
        raise InvalidField(f"at most {MAX_TASK_ID} characters", field=f"{path}.task_id")
    kind_path = f"{path}.{kind}."
    if kind == "detect" and message.detect.HasField("tracking") and not standing:
        raise InvalidField(
            "tracking is for the standing tasks of a session", field=f"{kind_path}tracking"
        )
    match kind:
        case "query":
            return query(message.query, kind_path)
        case "caption":
            return caption(message.caption, kind_path)
        case "detect":
            return detect(message.detect, kind_path)
        case "point":
            return point(message.point, kind_path)
        case "segment":
            return segment(message.segment, kind_path)


def tasks(
    messages: Sequence[task_pb2.Task],
    field: str = "tasks",
    *,
    least: int = 1,
    standing: bool = False,
) -> list[core.TaskSpec]:
    """Task ids must differ; `standing` is as in `task`."""
    if not least <= len(messages) <= MAX_TASKS:
        raise InvalidField(
            f"{least} to {MAX_TASKS} tasks", field=field, limit=MAX_TASKS, actual=len(messages)
        )
    seen: set[str] = set()
    for index, message in enumerate(messages):
        if message.task_id and message.task_id in seen:
            raise InvalidField("task ids must differ", field=f"{field}[{index}].task_id")
        seen.add(message.task_id)
    return [
        task(message, f"{field}[{index}]", standing=standing)
        for index, message in enumerate(messages)
    ]


def sampling(message: task_pb2.Sampling, path: str = "") -> core.SamplingParams:
    """Absent fields stay None."""
    if not message.ListFields():
        return _ALL_DEFAULTS
    prefix = f"{path}sampling."
    temperature = message.temperature if message.HasField("temperature") else None
    top_p = message.top_p if message.HasField("top_p") else None
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if temperature is not None and not 0 <= temperature < math.inf:
        raise InvalidField("must be finite and at least 0", field=f"{prefix}temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidField("must be in (0, 1]", field=f"{prefix}top_p")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidField("must be at least 1", field=f"{prefix}max_tokens")
    return core.SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=message.top_k if message.HasField("top_k") else None,
        max_tokens=max_tokens,
        seed=message.seed if message.HasField("seed") else None,
        stop=_stop_strings(message.stop, f"{prefix}stop"),
    )


def _stop_strings(texts: Sequence[str], field: str) -> tuple[str, ...]:
    if len(texts) > MAX_STOPS:
        raise InvalidField(f"at most {MAX_STOPS} stop strings", field=field)
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= MAX_STOP:
            raise InvalidField(f"1 to {MAX_STOP} characters", field=f"{field}[{index}]")
    return tuple(texts)


def _text(value: str, field: str, limit: int) -> str:
    if not value.strip():
        raise InvalidField("must not be empty", field=field)
    if len(value) > limit:
        raise PromptTooLong(
            f"{len(value)} characters, the limit is {limit}",
            field=field,
            limit=limit,
            actual=len(value),
        )
    return value


def _max_objects(message: Detect | Point, path: str) -> int | None:
    if not message.HasField("max_objects"):
        return None
    if message.max_objects < 1:
        raise InvalidField("must be at least 1", field=f"{path}max_objects")
    return message.max_objects


def _min_confidence(message: Detect | Point, path: str) -> float:
    if not 0 <= message.min_confidence <= 1:  # refuses NaN too
        raise InvalidField("must be in [0, 1]", field=f"{path}min_confidence")
    return message.min_confidence


def _order(message: Detect | Point, path: str) -> core.ObjectOrder:
    if message.order not in _ORDERS:
        raise InvalidField(f"{message.order} is not an order of objects", field=f"{path}order")
    return _ORDERS[message.order]


def _refs(messages: Sequence[geometry_pb2.SpatialRef], path: str) -> tuple[core.SpatialRef, ...]:
    if not messages:
        return ()
    if len(messages) > MAX_REFS:
        raise InvalidField(f"at most {MAX_REFS} spatial references", field=f"{path}spatial_refs")
    return tuple(
        _ref(message, f"{path}spatial_refs[{index}]") for index, message in enumerate(messages)
    )


def _ref(message: geometry_pb2.SpatialRef, field: str) -> core.SpatialRef:
    kind = message.WhichOneof("ref")
    if kind is None:
        raise InvalidField("a spatial reference is a point or a box", field=field)
    if kind == "point":
        x, y = message.point.x, message.point.y
        _check_coordinates((x, y), f"{field}.point")
        return core.Point(x=x, y=y)
    box = message.box
    _check_coordinates((box.x_min, box.y_min, box.x_max, box.y_max), f"{field}.box")
    if box.x_min > box.x_max or box.y_min > box.y_max:
        raise InvalidField("min is greater than max", field=f"{field}.box")
    return core.Box(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)


def _check_coordinates(values: tuple[float, ...], field: str) -> None:
    if not all(0 <= value <= 1 for value in values):  # refuses NaN too
        raise InvalidField("coordinates are finite and in [0, 1]", field=field)
