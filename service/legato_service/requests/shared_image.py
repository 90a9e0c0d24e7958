"""Several tasks on one image."""

from __future__ import annotations

import structlog
from legato.v1 import task_pb2
from legato_engine.core.images import CachedImage
from legato_engine.errors import (
    AdapterNotFound,
    AdapterUnusable,
    Busy,
    DeadlineExceeded,
    ImageNotFound,
    ImageTooLarge,
    ImageUndecodable,
    InternalError,
    LegatoError,
    Preempted,
    Unavailable,
)
from legato_engine.ipc.messages import Done, Started

from legato_service.convert import responses
from legato_service.errors import failure

log = structlog.get_logger("legato.rpc")

SHARED_FAILURES = (
    AdapterNotFound,
    AdapterUnusable,
    Busy,
    DeadlineExceeded,
    ImageNotFound,
    ImageTooLarge,
    ImageUndecodable,
    Preempted,
    Unavailable,
)
"""Errors of server, image or adapter, which fail all tasks; any other fails its own task only."""


def cached_image(started: Started) -> CachedImage | None:
    """The first task to start carries the image's bytes; the later ones refer to this."""
    image = started.image
    return CachedImage(image_id=image.image_id) if image and image.image_id else None


def task_result(task_id: str, outcome: Done | LegatoError, request_id: str) -> task_pb2.TaskResult:
    """The text of an internal error is only logged."""
    if isinstance(outcome, Done):
        return responses.task_result(task_id, outcome)
    if isinstance(outcome, InternalError):
        log.error("internal_error", request_id=request_id, exc_info=outcome)
    return responses.task_error(task_id, failure(outcome, request_id).status)
