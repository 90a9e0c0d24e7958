"""Sequences whose tokens are kept, and runs of them whose decodes are counted."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
from legato_engine.bench.workload import fixed_length
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.errors import TaskUnsupported
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.batch import LaunchKind, Plan, StepRecord
from legato_engine.scheduler.interfaces import Pause, sleep
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    ImageProperties,
    PointSpec,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
)
from PIL import Image

from benchmarks.speculation.run import RecordedTask

# ---------------------------------------------------------------- requests

# Requests of every skill.

NUM_SKILLS = 5


def question(
    assembly: Assembly, index: int, length: int, said: str = "what is there?"
) -> EngineSequence:
    """Make a question of its own, answered with `length` tokens, greedily or not."""
    temperature = (0.0, 0.7)[index % 2]
    request = Request(
        request_id=RequestKey(f"question-{index}"),
        task=QuerySpec(question=f"{index}: {said}"),
        sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=length),
    )
    sequence = make_sequence(assembly.frontend, request, None)
    constraints = range(len(assembly.frontend.constraints))
    return fixed_length(sequence, length, 0, constraints)


def picture(assembly: Assembly) -> PreparedImage:
    info = ImageProperties(image_id="picture", width=64, height=48, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return assembly.frontend.prepare_image(Image.fromarray(pixels), "picture", info)


def skilled(
    assembly: Assembly, image: PreparedImage, index: int, length: int, *, logprobs: bool = False
) -> EngineSequence:
    """Make one of the skills about an image, a caption if the model lacks it.

    The answer ends where it ends, or after `length` tokens.
    """
    label = f"thing {index}"
    task = (
        DetectSpec(object=label, max_objects=length),
        PointSpec(object=label, max_objects=length),
        QuerySpec(question=label, reasoning=True),
        SegmentSpec(object=label),
        CaptionSpec(),
    )[index % NUM_SKILLS]
    request = Request(
        request_id=RequestKey(f"skill-{index}"),
        task=task,
        image=CachedImageRef(image_id="picture"),
        sampling=SamplingParams(seed=index, max_tokens=length),
        logprobs=logprobs,
        return_tokens=logprobs,
    )
    try:
        return make_sequence(assembly.frontend, request, image)
    except TaskUnsupported:
        caption = msgspec.structs.replace(request, task=CaptionSpec())
        return make_sequence(assembly.frontend, caption, image)


# ---------------------------------------------------------------- decodes


class Decodes(SilentSink):
    """Runs sequences and counts their decodes."""

    def __init__(
        self,
        assembly: Assembly,
        *,
        at_once: int,
        depth: int = 2,
        shares: bool = False,
        pause: Pause = sleep,
    ) -> None:
        self.launches = self.waits = self.steps = 0
        self.plans: list[Plan] = []
        self.scheduler: Scheduler = assembly.scheduler(
            self,
            pipeline_depth=depth,
            prefills_per_decode=at_once,
            shares=shares,
            pause=pause,
            observer=self.committed,
        )

    @classmethod
    def timed(
        cls, assembly: Assembly, *, at_once: int, depth: int = 2, shares: bool = False
    ) -> Self:
        """Make a run whose time counts.

        What runs leave is collected before, not within it: scheduler and observer have each other.
        """
        gc.collect()
        return cls(assembly, at_once=at_once, depth=depth, shares=shares)

    def committed(self, launched: StepRecord) -> None:
        self.plans.append(launched.launch.plan)
        if launched.launch.plan.kind is LaunchKind.DECODE:
            self.launches += 1
            self.waits += launched.wait_end > launched.wait_start  # for the end of the launch
            self.steps += launched.num_steps_read or 1


def recorded(sequences: Sequence[EngineSequence]) -> list[RecordedTask]:
    tasks = []
    for index, sequence in enumerate(sequences):
        task = RecordedTask(sequence.task)
        sequence.task, sequence.seq_id = task, index
        tasks.append(task)
    return tasks


def values_of(sequence: EngineSequence, task: RecordedTask) -> list[tuple[object, ...]]:
    """Return an answer's tokens and log-probabilities, with values and certainty if it has any."""
    payload, logprobs = sequence.task.has_payload, sequence.request.logprobs
    return [
        (
            token.token_id,
            *((token.payload, token.certainty) if payload else ()),
            *((token.logprob,) if logprobs else ()),
        )
        for token in task.sampled
    ]
