"""Python values to protobuf requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import admin_pb2, geometry_pb2, inference_pb2, media_pb2, task_pb2

from legato_client._convert.chat import refuse_images, to_messages
from legato_client._values.results import FrameStamp, Point
from legato_client._values.tasks import (
    CaptionTask,
    DetectTask,
    Options,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    SpatialRef,
    Task,
    Tracking,
)

QuestionT = TypeVar(
    "QuestionT",
    inference_pb2.QueryRequest,
    inference_pb2.CaptionRequest,
    inference_pb2.DetectRequest,
    inference_pb2.PointRequest,
    inference_pb2.SegmentRequest,
)
RequestT = TypeVar(
    "RequestT",
    inference_pb2.QueryRequest,
    inference_pb2.CaptionRequest,
    inference_pb2.DetectRequest,
    inference_pb2.PointRequest,
    inference_pb2.SegmentRequest,
    inference_pb2.RunTasksRequest,
    inference_pb2.GenerateRequest,
)

_MAX_TASK_ID = 64  # characters that the contract allows

_LENGTHS: dict[str, task_pb2.CaptionLength.ValueType] = {
    "short": task_pb2.CAPTION_LENGTH_SHORT,
    "normal": task_pb2.CAPTION_LENGTH_NORMAL,
    "long": task_pb2.CAPTION_LENGTH_LONG,
}
_ORDERS: dict[str, task_pb2.ObjectOrder.ValueType] = {
    "model": task_pb2.OBJECT_ORDER_UNSPECIFIED,
    "confidence": task_pb2.OBJECT_ORDER_CONFIDENCE,
}


def query(
    image: media_pb2.Image | None, task: QueryTask, options: Options
) -> inference_pb2.QueryRequest:
    request = inference_pb2.QueryRequest(question=task.question, reasoning=task.reasoning)
    if task.spatial_refs:
        request.spatial_refs.extend(_refs(task.spatial_refs))
    if task.messages:
        request.messages.extend(to_messages(task.messages))
    return _question(request, task.sampling, options, image)


def caption(
    image: media_pb2.Image | None, task: CaptionTask, options: Options
) -> inference_pb2.CaptionRequest:
    request = inference_pb2.CaptionRequest(length=_length(task))
    return _question(request, task.sampling, options, image)


def detect(
    image: media_pb2.Image | None, task: DetectTask, options: Options
) -> inference_pb2.DetectRequest:
    request = inference_pb2.DetectRequest(
        object=task.object,
        max_objects=task.max_objects,
        min_confidence=task.min_confidence,
        order=_order(task),
    )
    return _question(request, task.sampling, options, image)


def point(
    image: media_pb2.Image | None, task: PointTask, options: Options
) -> inference_pb2.PointRequest:
    request = inference_pb2.PointRequest(
        object=task.object,
        max_objects=task.max_objects,
        spatial_refs=_refs(task.spatial_refs),
        min_confidence=task.min_confidence,
        order=_order(task),
    )
    return _question(request, task.sampling, options, image)


def segment(
    image: media_pb2.Image | None, task: SegmentTask, options: Options
) -> inference_pb2.SegmentRequest:
    request = inference_pb2.SegmentRequest(
        object=task.object, spatial_refs=_refs(task.spatial_refs)
    )
    return _question(request, task.sampling, options, image)


def run_tasks(
    image: media_pb2.Image | None, tasks: Sequence[Task], options: Options
) -> inference_pb2.RunTasksRequest:
    request = inference_pb2.RunTasksRequest(tasks=map(shared_task, tasks))
    return _asking(request, options, image)


def generate(
    image: media_pb2.Image | None, task: Task, options: Options
) -> inference_pb2.GenerateRequest:
    return _asking(inference_pb2.GenerateRequest(task=task_message(task)), options, image)


def abort(
    request_id: str | None, session_id: str | None, everything: bool
) -> admin_pb2.AbortRequest:
    """ValueError unless exactly one target is named."""
    if (request_id is not None) + (session_id is not None) + everything != 1:
        raise ValueError("name either a request_id, or a session_id, or everything=True")
    if request_id is not None:
        return admin_pb2.AbortRequest(request_id=request_id)
    if session_id is not None:
        return admin_pb2.AbortRequest(session_id=session_id)
    return admin_pb2.AbortRequest(all=True)


def watch_timeline(seconds: float | None) -> admin_pb2.WatchTimelineRequest:
    return admin_pb2.WatchTimelineRequest(duration=None if seconds is None else duration(seconds))


def drain(grace: float | None) -> admin_pb2.DrainRequest:
    return admin_pb2.DrainRequest(grace=None if grace is None else duration(grace))


def _question(
    request: QuestionT, sampling: Sampling, options: Options, image: media_pb2.Image | None
) -> QuestionT:
    _set_sampling(request.sampling, sampling)
    return _asking(request, options, image)


def _asking(request: RequestT, options: Options, image: media_pb2.Image | None) -> RequestT:
    _set_options(request.options, options)
    if options.stamp is not None:
        request.stamp.CopyFrom(stamp_message(options.stamp))
    if image is not None:  # copied so it shares the bytes, where a constructor encodes them
        request.image.CopyFrom(image)
    return request


def shared_task(asked: Task) -> task_pb2.Task:
    refuse_images(asked)
    return task_message(asked)


def session_tasks(asked: Sequence[Task]) -> list[task_pb2.Task]:
    """A task without an id is called by its object, and without an object by its skill.

    Raises:
        ValueError: two tasks have the same id.
    """
    messages = [shared_task(each) for each in asked]
    for message, task in zip(messages, asked, strict=True):
        name = getattr(task, "object", "") or message.WhichOneof("kind") or ""
        message.task_id = task.task_id or name[:_MAX_TASK_ID]
    ids = [message.task_id for message in messages]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise ValueError(f"several tasks are called {twice[0]!r}: give each its own task_id")
    return messages


def task_message(asked: Task) -> task_pb2.Task:
    message = task_pb2.Task(task_id=asked.task_id)
    _set_sampling(message.sampling, asked.sampling)
    match asked:
        case QueryTask():
            message.query.CopyFrom(
                task_pb2.QueryTask(
                    question=asked.question,
                    reasoning=asked.reasoning,
                    spatial_refs=_refs(asked.spatial_refs),
                    messages=to_messages(asked.messages),
                )
            )
        case CaptionTask():
            message.caption.CopyFrom(task_pb2.CaptionTask(length=_length(asked)))
        case DetectTask():
            message.detect.CopyFrom(
                task_pb2.DetectTask(
                    object=asked.object,
                    max_objects=asked.max_objects,
                    min_confidence=asked.min_confidence,
                    order=_order(asked),
                    tracking=_tracking(asked.tracking),
                )
            )
        case PointTask():
            message.point.CopyFrom(
                task_pb2.PointTask(
                    object=asked.object,
                    max_objects=asked.max_objects,
                    spatial_refs=_refs(asked.spatial_refs),
                    min_confidence=asked.min_confidence,
                    order=_order(asked),
                )
            )
        case SegmentTask():
            message.segment.CopyFrom(
                task_pb2.SegmentTask(object=asked.object, spatial_refs=_refs(asked.spatial_refs))
            )
    return message


def _tracking(tracking: Tracking | None) -> task_pb2.Tracking | None:
    if tracking is None:
        return None
    seconds = tracking.max_unseen
    return task_pb2.Tracking(max_unseen=None if seconds is None else duration(seconds))


def _length(task: CaptionTask) -> task_pb2.CaptionLength.ValueType:
    if task.length not in _LENGTHS:
        raise ValueError(f"caption length must be one of {sorted(_LENGTHS)}, got {task.length!r}")
    return _LENGTHS[task.length]


def _order(task: DetectTask | PointTask) -> task_pb2.ObjectOrder.ValueType:
    if task.order not in _ORDERS:
        raise ValueError(f"an order is one of {sorted(_ORDERS)}, got {task.order!r}")
    return _ORDERS[task.order]


def _set_sampling(message: task_pb2.Sampling, sampling: Sampling) -> None:
    """A default leaves no message at all."""
    if sampling.temperature is not None:
        message.temperature = sampling.temperature
    if sampling.top_p is not None:
        message.top_p = sampling.top_p
    if sampling.top_k is not None:
        message.top_k = sampling.top_k
    if sampling.max_tokens is not None:
        message.max_tokens = sampling.max_tokens
    if sampling.seed is not None:
        message.seed = sampling.seed
    if sampling.stop:
        message.stop.extend(sampling.stop)


def _refs(refs: Iterable[SpatialRef]) -> list[geometry_pb2.SpatialRef]:
    return [
        geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=ref.x, y=ref.y))
        if isinstance(ref, Point)
        else geometry_pb2.SpatialRef(
            box=geometry_pb2.Box(x_min=ref.x_min, y_min=ref.y_min, x_max=ref.x_max, y_max=ref.y_max)
        )
        for ref in refs
    ]


def _set_options(message: inference_pb2.RequestOptions, options: Options) -> None:
    if options.request_id:
        message.request_id = options.request_id
    if options.model:
        message.model = options.model
    if options.adapter:
        message.adapter = options.adapter
    if options.cache_image is not None:
        message.cache_image = options.cache_image
    if options.return_tokens:
        message.return_tokens = True
    if options.top_logprobs is not None:
        message.top_logprobs = options.top_logprobs


def stamp_message(stamp: FrameStamp) -> media_pb2.FrameStamp:
    capture_time = None
    if stamp.capture_time_ns is not None:
        capture_time = timestamp_pb2.Timestamp()
        capture_time.FromNanoseconds(stamp.capture_time_ns)
    return media_pb2.FrameStamp(
        frame_id=stamp.frame_id, capture_time=capture_time, sequence=stamp.sequence
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """ValueError for negative seconds."""
    if seconds < 0:
        raise ValueError(f"a time must not be negative, got {seconds}")
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
