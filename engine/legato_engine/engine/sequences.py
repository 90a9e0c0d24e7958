"""Sequences made of requests and what was prepared for them."""

from __future__ import annotations

from legato_engine.core.requests import Request
from legato_engine.models.capabilities import Adapter
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.sequence import HostInputs, Sequence, SequenceAdapter
from legato_engine.tasks import Task


def make_sequence(
    frontend: ModelFrontend,
    request: Request,
    image: PreparedImage | None,
    adapter: Adapter | None = None,
    *,
    task: Task | None = None,
) -> Sequence:
    """Make a waiting sequence. Raises as `make_task`.

    The prefix is not shared under another adapter, which changes its keys and values.
    """
    task = task or frontend.make_task(request)
    return Sequence(
        seq_id=0,
        request=request,
        task=task,
        prefix_key=(image.key if image else "") if request.cache_image else None,
        prefix_length=frontend.prefix_length(image is not None),
        prompt=task.prompt,
        num_crops=image.num_crops if image else 0,
        inputs=HostInputs(image, adapter),
        adapter=SequenceAdapter(adapter.key, adapter.rank) if adapter else SequenceAdapter(),
    )
