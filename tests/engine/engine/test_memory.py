"""Shortage and sharing of pages on real models never change a result."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.ipc.messages import KVCacheStats
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence
from legato_engine.types import (
    CachedImage,
    CaptionTask,
    DetectTask,
    FinishReason,
    ImageInfo,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    TaskResult,
    TaskSpec,
)
from PIL import Image

PAGE = 16


class Results(SilentSink):
    """A sink that keeps all results."""

    def __init__(self) -> None:
        self.of: dict[str, TaskResult] = {}

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Keep the result."""
        self.of[sequence.request.request_id.caller_id] = sequence.task.result(finish_reason)


@pytest.fixture(
    scope="module", params=["random-tiny", pytest.param("legato-tiny", marks=pytest.mark.slow)]
)
def assembly(request):
    """Each of the small models, loaded once."""
    config = EngineConfig(
        model=request.param, device="cpu", threads=1, max_running=6, page_size=PAGE
    )
    made = assemble(config)
    yield made
    made.device.close()


def texts(assembly: Assembly) -> list[Sequence]:
    """Random queries without an image, with more output than prompt."""
    made = []
    for index, word in enumerate(("seen", "seen", "said", "seen", "heard")):
        sampling = SamplingParams(temperature=2.0, top_p=1.0, max_tokens=60, seed=index)
        task = QueryTask(question=f"what is there to be {word}")
        made.append(sequence(assembly, f"r{index}", task, sampling, has_image=False))
        made[-1].seq_id = index
    return made


def sequences(assembly: Assembly) -> list[Sequence]:
    """Greedy and random requests, with and without an image, many with a common prefix."""
    reasons = assembly.frontend.name == "random-tiny"  # points in between; the other cannot
    greedy = SamplingParams(temperature=0.0, max_tokens=40, seed=0)
    wild = SamplingParams(temperature=2.0, top_p=1.0, max_tokens=60, seed=7)
    asked: list[tuple[TaskSpec, bool, SamplingParams]] = [
        (QueryTask(question="what is there to be seen"), False, wild),
        (CaptionTask(), True, wild),
        (QueryTask(question="what is there to be seen"), False, greedy),
        (DetectTask(object="cat", max_objects=12), True, greedy),
        (QueryTask(question="what is there to be said"), False, wild),
        (QueryTask(question="what is there to be seen"), True, wild),
        (QueryTask(question="what?", reasoning=reasons), True, wild),
    ]
    made = [
        sequence(assembly, f"r{index}", task, sampling, has_image=has_image)
        for index, (task, has_image, sampling) in enumerate(asked)
    ]
    for index, each in enumerate(made):
        each.seq_id = index
    return made


def sequence(
    assembly: Assembly, name: str, task: TaskSpec, sampling: SamplingParams, *, has_image: bool
) -> Sequence:
    """Return a request's sequence; all images are the same."""
    info = ImageInfo(image_id="noise", width=40, height=30, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    image = assembly.frontend.prepare_image(Image.fromarray(pixels), "noise", info)
    request = Request(
        request_id=RequestKey(name),
        task=task,
        image=CachedImage(image_id="noise") if has_image else None,
        sampling=sampling,
    )
    return make_sequence(assembly.frontend, request, image if has_image else None)


def answers(
    assembly: Assembly, asked: list[Sequence], num_pages: int, depth: int, *, together: bool
) -> tuple[dict[str, TaskResult], KVCacheStats]:
    """Run all requests through one scheduler of `num_pages`, together or one after another."""
    sink = Results()
    few = dataclasses.replace(assembly, num_pages=num_pages)
    scheduler: Scheduler = few.scheduler(sink, pipeline_depth=depth)
    for each in asked:
        scheduler.submit(each)
        if not together:
            scheduler.drain()
    scheduler.drain()
    output = scheduler.load().kv
    assert output is not None
    return sink.of, output


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("make", [texts, sequences])
def test_a_shortage_of_pages_changes_no_answer(assembly, make, depth):
    """With preemption and sharing, every result is bit for bit that with enough pages."""
    tight = -(-max(each.max_length for each in make(assembly)) // PAGE) + 3
    alone, _ = answers(assembly, make(assembly), assembly.num_pages, 2, together=False)
    crowded, output = answers(assembly, make(assembly), tight, depth, together=True)
    assert output.preemptions > 0 or make is sequences
    assert output.hit_rate > 0
    assert crowded == alone


def test_a_long_prefix_is_computed_once():
    """After a prompt of 700 tokens the next computes only what differs, with the same result."""
    config = EngineConfig(model="legato-tiny", device="cpu", threads=1, page_size=PAGE)
    assembly = assemble(config)
    sampling = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
    system = "the red shape is left of the blue shape and the green one is below. " * 43

    def asked(name: str, question: str) -> Sequence:
        cut = QueryTask(question=system + question)
        return sequence(assembly, name, cut, sampling, has_image=False)

    def run(*each: Sequence) -> Results:
        sink = Results()
        scheduler = assembly.scheduler(sink, pipeline_depth=2)
        for one in each:
            scheduler.submit(one)
            scheduler.drain()
        return sink

    first, second = asked("first", "where is it?"), asked("second", "which colour?")
    shared = run(first, second).of
    assert second.prompt_length > 700
    assert first.pages.cached_tokens == 0
    assert second.pages.cached_tokens >= 690
    assert shared["second"] == run(asked("second", "which colour?")).of["second"]
    assembly.device.close()
