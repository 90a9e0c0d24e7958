"""One task as one call."""

from __future__ import annotations

from legato_client._async_client import AsyncClient
from legato_client._errors import InvalidArgument
from legato_client._values.results import Result
from legato_client._values.tasks import (
    CaptionTask,
    DetectTask,
    Options,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
)


async def ask(
    client: AsyncClient, image: bytes | None, task: Task, options: Options, seconds: float
) -> Result:
    """The skill's own call, which gRPC repeats where it may; fails as the client's call does.

    A question, not a conversation: that has its picture among its messages.
    """
    if isinstance(task, QueryTask):
        return await client.query(
            image,
            task.question,
            reasoning=task.reasoning,
            spatial_refs=task.spatial_refs,
            sampling=task.sampling,
            options=options,
            timeout=seconds,
        )
    if image is None:
        raise InvalidArgument("this task needs a picture", reason="INVALID_FIELD")
    match task:
        case CaptionTask(length, sampling):
            return await client.caption(
                image, length, sampling=sampling, options=options, timeout=seconds
            )
        case DetectTask(noun, most, sampling):
            return await client.detect(
                image,
                noun,
                max_objects=most,
                min_confidence=task.min_confidence,
                order=task.order,
                sampling=sampling,
                options=options,
                timeout=seconds,
            )
        case PointTask(noun, most, refs, sampling):
            return await client.point(
                image,
                noun,
                max_objects=most,
                spatial_refs=refs,
                min_confidence=task.min_confidence,
                order=task.order,
                sampling=sampling,
                options=options,
                timeout=seconds,
            )
        case SegmentTask(noun, refs, sampling):
            return await client.segment(
                image,
                noun,
                spatial_refs=refs,
                sampling=sampling,
                options=options,
                timeout=seconds,
            )
