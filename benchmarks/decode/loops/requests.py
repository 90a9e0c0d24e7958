"""Requests of every skill."""

from __future__ import annotations

import msgspec
import numpy as np
from legato_engine.bench.workload import fixed_length
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.errors import TaskUnsupported
from legato_engine.models.bundle import PreparedImage
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    CachedImage,
    CaptionTask,
    DetectTask,
    ImageInfo,
    PointTask,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    SegmentTask,
)
from PIL import Image

NUM_SKILLS = 5


def question(
    assembly: Assembly, index: int, length: int, said: str = "what is there?"
) -> EngineSequence:
    """A question of its own, answered with `length` tokens, greedily or not."""
    temperature = (0.0, 0.7)[index % 2]
    request = Request(
        request_id=RequestKey(f"question-{index}"),
        task=QueryTask(question=f"{index}: {said}"),
        sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=length),
    )
    sequence = make_sequence(assembly.frontend, request, None)
    constraints = range(len(assembly.frontend.constraints))
    return fixed_length(sequence, length, 0, constraints)


def picture(assembly: Assembly) -> PreparedImage:
    info = ImageInfo(image_id="picture", width=64, height=48, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return assembly.frontend.prepare_image(Image.fromarray(pixels), "picture", info)


def skilled(
    assembly: Assembly, image: PreparedImage, index: int, length: int, *, logprobs: bool = False
) -> EngineSequence:
    """One of the skills about an image, a caption if the model lacks it, with an answer that ends
    where it ends, or after `length` tokens.
    """
    label = f"thing {index}"
    task = (
        DetectTask(object=label, max_objects=length),
        PointTask(object=label, max_objects=length),
        QueryTask(question=label, reasoning=True),
        SegmentTask(object=label),
        CaptionTask(),
    )[index % NUM_SKILLS]
    request = Request(
        request_id=RequestKey(f"skill-{index}"),
        task=task,
        image=CachedImage(image_id="picture"),
        sampling=SamplingParams(seed=index, max_tokens=length),
        logprobs=logprobs,
        return_tokens=logprobs,
    )
    try:
        return make_sequence(assembly.frontend, request, image)
    except TaskUnsupported:
        caption = msgspec.structs.replace(request, task=CaptionTask())
        return make_sequence(assembly.frontend, caption, image)
