"""Python values to protobuf requests."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf import timestamp_pb2
from legato.v1 import admin_pb2, image_pb2, inference_pb2, media_pb2, task_pb2

from legato_client._proto import skills
from legato_client._proto.pieces import duration, fill
from legato_client._proto.skills import refuse_images
from legato_client._types.results import FrameStamp
from legato_client._types.tasks import Options, Task

RequestT = TypeVar("RequestT", bound=Any)  # requests share fields, not a class

_MAX_TASK_ID = 64  # characters that the contract allows


def question(image: media_pb2.Image | None, task: Task, options: Options) -> Any:
    """Build the request of the skill's own call."""
    request: Any = skills.of(task).request()
    skills.write(task, request)
    return _asking(request, options, image)


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
    """Build an abort request. Raises ValueError unless exactly one target is named."""
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


def _asking(request: RequestT, options: Options, image: media_pb2.Image | None) -> RequestT:
    fill(request.options, options)
    if options.stamp is not None:
        request.stamp.CopyFrom(stamp_message(options.stamp))
    if image is not None:  # copied so it shares the bytes, where a constructor encodes them
        request.image.CopyFrom(image)
    return request


def shared_task(asked: Task) -> task_pb2.Task:
    refuse_images(asked)
    return task_message(asked)


def session_tasks(asked: Sequence[Task]) -> list[task_pb2.Task]:
    """Name tasks without an id by their object, or by their skill if they have none.

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
    message = task_pb2.Task()
    skills.write(asked, message)
    own = getattr(message, skills.of(asked).name)
    own.SetInParent()
    skills.write(asked, own)
    return message


def stamp_message(stamp: FrameStamp) -> media_pb2.FrameStamp:
    capture_time = None
    if stamp.capture_time_ns is not None:
        capture_time = timestamp_pb2.Timestamp()
        capture_time.FromNanoseconds(stamp.capture_time_ns)
    return media_pb2.FrameStamp(
        frame_id=stamp.frame_id, capture_time=capture_time, sequence=stamp.sequence
    )


# ---------------------------------------------------------------- upload

CHUNK_BYTES = 256 * 1024
_ROW_BYTES = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "nv12": 1, "yuyv": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A header and the bytes it announces; a retry calls `requests` again."""

    header: image_pb2.PutImageHeader
    data: bytes
    image_id: str

    @classmethod
    def of(cls, image: media_pb2.Image, ttl: float | None) -> Upload:
        """Cut an image into upload messages. Raises TypeError for an image without bytes."""
        header = image_pb2.PutImageHeader()
        match image.WhichOneof("source"):
            case "encoded":
                data = image.encoded.data
                header.mime_type = image.encoded.mime_type
            case "raw":
                data = image.raw.data
                header.layout.CopyFrom(image.raw.layout)
            case source:
                raise TypeError(f"only an image's own bytes can be uploaded, got {source}")
        header.size_bytes = len(data)
        digest = hashlib.sha256(data)
        header.sha256 = digest.digest()
        if header.HasField("layout"):
            digest = hashlib.sha256(_layout(header.layout))
            digest.update(data)
        if ttl is not None:
            header.ttl.CopyFrom(duration(ttl))
        return cls(header, data, f"img_{digest.hexdigest()[:32]}")

    def requests(self) -> Iterator[bytes]:
        """Yield the upload's requests, header first."""
        yield image_pb2.PutImageRequest(header=self.header).SerializeToString()
        for start in range(0, len(self.data), CHUNK_BYTES):
            chunk = self.data[start : start + CHUNK_BYTES]
            yield image_pb2.PutImageRequest(chunk=chunk).SerializeToString()


def _layout(layout: media_pb2.PixelLayout) -> bytes:
    """Return the line that an image id covers before the pixels."""
    name = media_pb2.PixelFormat.Name(layout.format).removeprefix("PIXEL_FORMAT_").lower()
    stride = layout.row_stride_bytes or layout.width * _ROW_BYTES.get(name, 0)
    return f"{name}:{layout.width}x{layout.height}:{stride}\n".encode()
