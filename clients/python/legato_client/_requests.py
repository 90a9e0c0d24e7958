"""Python values to protobuf requests: pure functions shared by both clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import admin_pb2, geometry_pb2, inference_pb2, media_pb2, task_pb2

from legato_client._chat import refuse_pictures, to_messages
from legato_client._tasks import (
    CaptionTask,
    DetectTask,
    Options,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    SpatialRef,
    Task,
)
from legato_client._types import FrameStamp, Point

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

_DEFAULT_SAMPLING = Sampling()
_DEFAULT_OPTIONS = Options()
_LENGTHS: dict[str, task_pb2.CaptionLength.ValueType] = {
    "short": task_pb2.CAPTION_LENGTH_SHORT,
    "normal": task_pb2.CAPTION_LENGTH_NORMAL,
    "long": task_pb2.CAPTION_LENGTH_LONG,
}


def query(
    image: media_pb2.Image | None, task: QueryTask, options: Options
) -> inference_pb2.QueryRequest:
    """A Query request."""
    request = inference_pb2.QueryRequest(
        question=task.question,
        reasoning=task.reasoning,
        spatial_refs=_refs(task.spatial_refs),
        messages=to_messages(task.messages),
        sampling=_sampling(task.sampling),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def caption(
    image: media_pb2.Image | None, task: CaptionTask, options: Options
) -> inference_pb2.CaptionRequest:
    """A Caption request."""
    request = inference_pb2.CaptionRequest(
        length=_length(task),
        sampling=_sampling(task.sampling),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def detect(
    image: media_pb2.Image | None, task: DetectTask, options: Options
) -> inference_pb2.DetectRequest:
    """A Detect request."""
    request = inference_pb2.DetectRequest(
        object=task.object,
        max_objects=task.max_objects,
        sampling=_sampling(task.sampling),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def point(
    image: media_pb2.Image | None, task: PointTask, options: Options
) -> inference_pb2.PointRequest:
    """A Point request."""
    request = inference_pb2.PointRequest(
        object=task.object,
        max_objects=task.max_objects,
        spatial_refs=_refs(task.spatial_refs),
        sampling=_sampling(task.sampling),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def segment(
    image: media_pb2.Image | None, task: SegmentTask, options: Options
) -> inference_pb2.SegmentRequest:
    """A Segment request."""
    request = inference_pb2.SegmentRequest(
        object=task.object,
        spatial_refs=_refs(task.spatial_refs),
        sampling=_sampling(task.sampling),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def run_tasks(
    image: media_pb2.Image | None, tasks: Sequence[Task], options: Options
) -> inference_pb2.RunTasksRequest:
    """A RunTasks request."""
    request = inference_pb2.RunTasksRequest(
        tasks=map(shared_task, tasks),
        options=_options(options),
        stamp=_stamp(options.stamp),
    )
    return _showing(request, image)


def generate(
    image: media_pb2.Image | None, task: Task, options: Options
) -> inference_pb2.GenerateRequest:
    """A Generate request."""
    request = inference_pb2.GenerateRequest(
        task=task_message(task), options=_options(options), stamp=_stamp(options.stamp)
    )
    return _showing(request, image)


def abort(
    request_id: str | None, session_id: str | None, everything: bool
) -> admin_pb2.AbortRequest:
    """An Abort request; ValueError unless exactly one target is named."""
    if (request_id is not None) + (session_id is not None) + everything != 1:
        raise ValueError("name either a request_id, or a session_id, or everything=True")
    if request_id is not None:
        return admin_pb2.AbortRequest(request_id=request_id)
    if session_id is not None:
        return admin_pb2.AbortRequest(session_id=session_id)
    return admin_pb2.AbortRequest(all=True)


def drain(grace: float | None) -> admin_pb2.DrainRequest:
    """A Drain request."""
    return admin_pb2.DrainRequest(grace=None if grace is None else duration(grace))


def _showing(request: RequestT, image: media_pb2.Image | None) -> RequestT:
    """`request` with its picture; `CopyFrom` shares the bytes, where a constructor encodes them."""
    if image is not None:
        request.image.CopyFrom(image)
    return request


def shared_task(asked: Task) -> task_pb2.Task:
    """A Task message of a call whose picture is that of several tasks."""
    refuse_pictures(asked)
    return task_message(asked)


def task_message(asked: Task) -> task_pb2.Task:
    """A Task message."""
    message = task_pb2.Task(task_id=asked.task_id, sampling=_sampling(asked.sampling))
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
                task_pb2.DetectTask(object=asked.object, max_objects=asked.max_objects)
            )
        case PointTask():
            message.point.CopyFrom(
                task_pb2.PointTask(
                    object=asked.object,
                    max_objects=asked.max_objects,
                    spatial_refs=_refs(asked.spatial_refs),
                )
            )
        case SegmentTask():
            message.segment.CopyFrom(
                task_pb2.SegmentTask(object=asked.object, spatial_refs=_refs(asked.spatial_refs))
            )
    return message


def _length(task: CaptionTask) -> task_pb2.CaptionLength.ValueType:
    if task.length not in _LENGTHS:
        raise ValueError(f"caption length must be one of {sorted(_LENGTHS)}, got {task.length!r}")
    return _LENGTHS[task.length]


def _sampling(sampling: Sampling) -> task_pb2.Sampling | None:
    if sampling == _DEFAULT_SAMPLING:
        return None
    return task_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=sampling.stop,
    )


def _refs(refs: Iterable[SpatialRef]) -> list[geometry_pb2.SpatialRef]:
    return [
        geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=ref.x, y=ref.y))
        if isinstance(ref, Point)
        else geometry_pb2.SpatialRef(
            box=geometry_pb2.Box(x_min=ref.x_min, y_min=ref.y_min, x_max=ref.x_max, y_max=ref.y_max)
        )
        for ref in refs
    ]


def _options(options: Options) -> inference_pb2.RequestOptions | None:
    if options == _DEFAULT_OPTIONS:
        return None
    message = inference_pb2.RequestOptions(
        request_id=options.request_id,
        model=options.model,
        adapter=options.adapter,
        cache_image=options.cache_image,
        return_tokens=options.return_tokens,
        top_logprobs=options.top_logprobs,
    )
    return message if message.ByteSize() else None


def _stamp(stamp: FrameStamp | None) -> media_pb2.FrameStamp | None:
    return None if stamp is None else stamp_message(stamp)


def stamp_message(stamp: FrameStamp) -> media_pb2.FrameStamp:
    """A FrameStamp message."""
    capture_time = None
    if stamp.capture_time_ns is not None:
        capture_time = timestamp_pb2.Timestamp()
        capture_time.FromNanoseconds(stamp.capture_time_ns)
    return media_pb2.FrameStamp(
        frame_id=stamp.frame_id, capture_time=capture_time, sequence=stamp.sequence
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as protobuf; ValueError when they are negative."""
    if seconds < 0:
        raise ValueError(f"a time must not be negative, got {seconds}")
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
