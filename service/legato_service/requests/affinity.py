"""What of a request an engine may have computed before."""

from __future__ import annotations

from collections.abc import Iterator

from legato_engine.core.images import CachedImage
from legato_engine.core.requests import Request
from legato_engine.core.task_specs import QueryTask, TaskSpec

from legato_service.engines.directory import Key, image_key
from legato_service.images.intake import CheckedImage, InlineImage, StagedImage

PREFIX = 256
"""Characters of text that prompts must share for their prefix to be worth a choice of engine."""

_PART = 512  # bytes of an image, of its beginning, middle and end


def keys_of(request: Request, image: CheckedImage) -> tuple[Key, ...]:
    """The most valuable first: image or prefix, the other parts of its call or session, adapter."""
    return tuple(_keys(request, image))


def bytes_key(tenant: str, data: bytes | memoryview) -> Key:
    """Equal for equal images, and hardly ever for others: hashing all bytes would cost more."""
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return "bytes", tenant, len(data), hash(tuple(map(bytes, parts)))


def _keys(request: Request, image: CheckedImage) -> Iterator[Key]:
    tenant = request.tenant
    match image:
        case CachedImage():
            yield image_key(tenant, image.image_id)
        case InlineImage() if request.cache_image:
            yield bytes_key(tenant, image.data)
        case StagedImage() if request.cache_image:
            yield bytes_key(tenant, image.writer.view())
        case None if len(prefix := _prefix(request.task)) == PREFIX:
            yield "prefix", tenant, request.adapter, hash(prefix)
    if request.request_id.part:
        yield "call", tenant, request.request_id.caller_id
    if request.adapter:
        yield "adapter", request.adapter


def _prefix(task: TaskSpec) -> str:
    """The beginning of a prompt without an image."""
    if not isinstance(task, QueryTask):
        return ""
    first = task.history[0].question if task.history else task.question
    return f"{task.system}\n{first}"[:PREFIX]
