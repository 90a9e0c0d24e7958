"""Python values to protobuf requests."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from legato.v1 import image_pb2, inference_pb2, media_pb2, task_pb2

from legato_client._proto import skills
from legato_client._proto.pieces import duration, fill
from legato_client._types.results import FrameStamp
from legato_client._types.tasks import Options, Task

RequestT = TypeVar("RequestT", bound=Any)  # requests share fields, not a class

_MAX_TASK_ID = 64  # characters that the contract allows


def question(image: media_pb2.Image | None, task: Task, options: Options) -> Any:
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


def _asking(request: RequestT, options: Options, image: media_pb2.Image | None) -> RequestT:
    fill(request.options, options)
    if options.stamp is not None:
        request.stamp.CopyFrom(stamp_message(options.stamp))
    if image is not None:  # copied so it shares the bytes, where a constructor encodes them
        request.image.CopyFrom(image)
    return request


def shared_task(asked: Task) -> task_pb2.Task:
    """Convert one of the tasks that share the call's image. Raises ValueError for one in it."""
    if skills.shown_images(asked):
        raise ValueError("this call is given its image beside the tasks, not inside a message")
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
    message = media_pb2.FrameStamp(frame_id=stamp.frame_id, sequence=stamp.sequence)
    if stamp.capture_time_ns is not None:
        message.capture_time.FromNanoseconds(stamp.capture_time_ns)
    return message


# ---------------------------------------------------------------- upload

CHUNK_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A header and the bytes it announces; a retry calls `requests` again."""

    header: image_pb2.PutImageHeader
    data: bytes
    image_id: str

    @classmethod
    def of(cls, image: media_pb2.Image, ttl: float | None) -> Upload:
        """Cut an image into upload messages. Raises TypeError for an image without bytes."""
        header = image_pb2.PutImageHeader(ttl=duration(ttl))
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
    return f"{name}:{layout.width}x{layout.height}:{layout.row_stride_bytes}\n".encode()
