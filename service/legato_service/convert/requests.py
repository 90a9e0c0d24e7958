"""Protobuf requests to `core` values: every rule that needs neither the image nor the model.

Bounds of single fields were checked before, by `rpc.limits`.
Functions raise `InvalidField` with the path of the field; `path` is its prefix, like
`task.detect.`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_engine.errors import InvalidField
from legato_engine.types import QuerySpec, Request, RequestKey, SamplingParams, TaskSpec

from legato_service.convert import skills

MAX_TASKS, MAX_TASK_ID = 32, 64
MIN_HEARTBEAT = 0.1  # seconds
DEFAULT_UNSEEN = 2.0  # seconds

_ALL_DEFAULTS = SamplingParams()


def heartbeat(
    message: inference_pb2.RequestOptions | session_pb2.SessionOpen,
    default: float = math.inf,
) -> float:
    """Return the seconds of silence before a heartbeat; the default is none."""
    if not message.HasField("heartbeat_interval"):
        return default
    return max(skills.seconds(message.heartbeat_interval), MIN_HEARTBEAT)


def images(
    message: media_pb2.Image,
    several: Sequence[task_pb2.QueryImage],
    task: TaskSpec,
    path: str = "",
) -> list[media_pb2.Image]:
    """Return the request's images: its own, or the `several` of its query.

    Raises:
        InvalidField: it has both, or none and the task needs one.
    """
    if not several:
        return [message] if check_image(message, task, path) else []
    if message.WhichOneof("source") is not None:
        raise InvalidField("an image or several, not both", field=f"{path}images")
    return [each.image for each in several]


def check_image(message: media_pb2.Image, task: TaskSpec, path: str = "") -> bool:
    """Return whether the request has an image; refuse it when the task needs one."""
    if message.WhichOneof("source") is not None:
        return True
    if not isinstance(task, QuerySpec):
        raise InvalidField("this task needs an image", field="image")
    if task.spatial_refs:
        raise InvalidField("spatial references need an image", field=f"{path}spatial_refs")
    if task.shows_image:
        raise InvalidField("a message refers to an image, but the request has none", field="image")
    return False


def request(
    key: RequestKey,
    task: TaskSpec,
    sampling: SamplingParams,
    options: inference_pb2.RequestOptions,
    *,
    deltas: bool = True,
    progress: bool = True,
) -> Request:
    """Build the engine's request, without its image and deadline."""
    logprobs = options.HasField("top_logprobs")
    return Request(
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


def tracking(message: task_pb2.Tracking) -> float:
    """Return the seconds for which an unseen track lives."""
    if not message.HasField("max_unseen"):
        return DEFAULT_UNSEEN
    return skills.seconds(message.max_unseen)


def task(
    message: task_pb2.Task, path: str, *, standing: bool = False, own_images: bool = False
) -> TaskSpec:
    """Convert a task; `path` has no final dot, a `standing` task runs on every frame.

    A query may have its `own_images`, or is about the call's image.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidField("a task needs its kind", field=path)
    kind_path = f"{path}.{kind}."
    if kind == "detect" and message.detect.HasField("tracking") and not standing:
        raise InvalidField(
            "tracking is for the standing tasks of a session", field=f"{kind_path}tracking"
        )
    if kind == "query" and message.query.images and not own_images:
        raise InvalidField("this query is about the call's image", field=f"{kind_path}images")
    return skills.BY_NAME[kind].task(getattr(message, kind), kind_path)


def tasks(
    messages: Sequence[task_pb2.Task],
    field: str = "tasks",
    *,
    least: int = 1,
    standing: bool = False,
) -> list[TaskSpec]:
    """Convert tasks, whose ids must differ; `standing` is as in `task`."""
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


def sampling(message: task_pb2.Sampling, path: str = "") -> SamplingParams:
    """Convert sampling; absent fields stay None."""
    if not message.ListFields():
        return _ALL_DEFAULTS
    prefix = f"{path}sampling."
    if "" in message.stop:
        index = list(message.stop).index("")
        raise InvalidField("must not be empty", field=f"{prefix}stop[{index}]")
    given = {field.name: value for field, value in message.ListFields()}
    return SamplingParams(**{**given, "stop": tuple(message.stop)})
