"""Several tasks on one picture: what is theirs together, and what is each one's own."""

from __future__ import annotations

import structlog
from legato.v1 import task_pb2
from legato_engine import core
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
"""What is wrong with server, picture or adapter fails all the tasks; the rest only its own."""


def held_name(started: Started) -> core.CachedImage | None:
    """The name of the picture that a request brought into the engine; None when it is not held.

    The first task to start carries the picture's bytes, the later ones this name.
    """
    image = started.image
    return core.CachedImage(image_id=image.image_id) if image and image.image_id else None


def task_result(task_id: str, ended: Done | LegatoError, request_id: str) -> task_pb2.TaskResult:
    """How one task ended, well or not; a bug's text goes to the log only."""
    if isinstance(ended, Done):
        return responses.task_result(task_id, ended)
    if isinstance(ended, InternalError):
        log.error("internal_error", request_id=request_id, exc_info=ended)
    return responses.task_error(task_id, failure(ended, request_id).status)
