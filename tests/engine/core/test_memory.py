"""Shortage and sharing of pages, and shared launches, never change a result."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import KVCacheStats
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    FinishReason,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TaskOutput,
    TaskSpec,
)
from PIL import Image

from tests.adapters import random_adapter, safetensors_file
from tests.engine.speculative.test_speculation import TASKS, Run

PAGE = 16


class Results(SilentSink):
    """A sink that keeps all results."""

    def __init__(self) -> None:
        self.of: dict[str, TaskOutput] = {}

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
        task = QuerySpec(question=f"what is there to be {word}")
        made.append(sequence(assembly, f"r{index}", task, sampling, has_image=False))
        made[-1].seq_id = index
    return made


def sequences(assembly: Assembly) -> list[Sequence]:
    """Greedy and random requests, with and without an image, many with a common prefix."""
    reasons = assembly.frontend.name == "random-tiny"  # points in between; the other cannot
    greedy = SamplingParams(temperature=0.0, max_tokens=40, seed=0)
    wild = SamplingParams(temperature=2.0, top_p=1.0, max_tokens=60, seed=7)
    asked: list[tuple[TaskSpec, bool, SamplingParams]] = [
        (QuerySpec(question="what is there to be seen"), False, wild),
        (CaptionSpec(), True, wild),
        (QuerySpec(question="what is there to be seen"), False, greedy),
        (DetectSpec(object="cat", max_objects=12), True, greedy),
        (QuerySpec(question="what is there to be said"), False, wild),
        (QuerySpec(question="what is there to be seen"), True, wild),
        (QuerySpec(question="what?", reasoning=reasons), True, wild),
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
    info = ImageProperties(image_id="noise", width=40, height=30, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    image = assembly.frontend.prepare_image(Image.fromarray(pixels), "noise", info)
    request = Request(
        request_id=RequestKey(name),
        task=task,
        image=CachedImageRef(image_id="noise") if has_image else None,
        sampling=sampling,
    )
    return make_sequence(assembly.frontend, request, image if has_image else None)


def answers(
    assembly: Assembly, asked: list[Sequence], num_pages: int, depth: int, *, together: bool
) -> tuple[dict[str, TaskOutput], KVCacheStats]:
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
    answers_are_long = make is texts and assembly.frontend.name == "random-tiny"
    assert output.preemptions > 0 or not answers_are_long
    assert output.hit_rate > 0
    assert crowded == alone


@pytest.mark.parametrize("make", [texts, sequences])
def test_chunks_of_prompts_change_no_answer(assembly, make, monkeypatch):
    """Prompts in chunks between decodes give the same bits, with few pages, too."""
    alone, _ = answers(assembly, make(assembly), assembly.num_pages, 2, together=False)
    limits = dataclasses.replace(assembly.runner.limits, chunk_above=5, long_chunk_tokens=5)
    monkeypatch.setattr(assembly.runner._backend, "limits", limits)
    tight = -(-max(each.max_length for each in make(assembly)) // PAGE) + 3
    for num_pages in (assembly.num_pages, tight):
        run, _ = answers(assembly, make(assembly), num_pages, 2, together=True)
        assert run == alone


def test_a_long_prefix_is_computed_once():
    """After a prompt of 700 tokens the next computes only what differs, with the same result."""
    config = EngineConfig(model="legato-tiny", device="cpu", threads=1, page_size=PAGE)
    assembly = assemble(config)
    sampling = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
    system = "the red shape is left of the blue shape and the green one is below. " * 43

    def asked(name: str, question: str) -> Sequence:
        cut = QuerySpec(question=system + question)
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


# ---------------------------------------------------------------- prefix sharing
# Shared launches, mixed decodes included, give the same answers as separate ones.

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=7, page_size=4, max_prefill_rows=3
)


ADAPTERS = ("x", "y")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """One model with adapters, for all tests."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        tensors = random_adapter(tiny_random_config().text, 4 + 8 * seed, seed)
        (folder / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    made = assemble(msgspec.structs.replace(CONFIG, adapters=str(folder)))
    yield made
    made.device.close()


class Alone:
    """An assembly whose prompts share no launches."""

    def __init__(self, assembly):
        self._assembly = assembly

    def __getattr__(self, name):
        return getattr(self._assembly, name)

    def scheduler(self, sink, **options):
        """Return a scheduler without shared launches."""
        return self._assembly.scheduler(sink, shares=False, **options)


def run_all(assembly, seed, *, adapters=None, rounds=2, **options):
    """Run every skill `rounds` times, in bursts while others decode, some with logprobs."""
    draw, run = random.Random(seed), Run(assembly, **options)
    names = [(name, turn) for name in TASKS for turn in range(rounds)]
    for name, turn in draw.sample(names, len(names)):
        adapter = (adapters or {}).get(name)
        about = TASKS[name]
        run.submit(f"{name} {turn}", *about, seed=turn, adapter=adapter, logprobs=turn == 0)
        for _ in range(draw.choice((0, 0, 0, 0, 9))):
            run.scheduler.step()
    return run.finish()


def shared(run):
    """Return how many launches had mixed decodes, and how many several prompts."""
    plans = [record.launch.plan for record in run.records]
    return sum(plan.num_mixed_decodes > 0 for plan in plans), sum(
        len(plan.prefills) > 1 for plan in plans
    )


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_sharing_changes_no_answer(adapted, temperature):
    """Tokens, payloads, log-probabilities and events of every skill are equal, at both depths."""
    alone = run_all(Alone(adapted), 0, depth=1, temperature=temperature)
    assert shared(alone) == (0, 0)
    for seed, depth in ((0, 1), (1, 2), (2, 2)):
        run = run_all(adapted, seed, depth=depth, temperature=temperature)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0


def test_sharing_with_few_pages_changes_no_answer(adapted):
    """Also with mixed decodes that begin a page, and with preempted and repeated prefills."""
    alone = run_all(Alone(adapted), 0, temperature=0.8)
    longest = max(sequence.max_length for sequence in alone.sequences.values())
    scarce = dataclasses.replace(adapted, num_pages=longest // CONFIG.page_size + 12)
    for seed in (1, 2):
        run = run_all(scarce, seed, temperature=0.8)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0
        assert run.scheduler.load().kv.preemptions > 0


def test_adapters_share_and_change_no_answer(adapted):
    """Prompts and decodes with two adapters and without share launches."""
    folder, read = Path(adapted.config.adapters), adapted.model.read_adapter
    adapters = {
        skill: read((folder / f"{name}.safetensors").read_bytes(), name, 16)
        for skill, name in zip(TASKS, ADAPTERS, strict=False)
    }
    alone = run_all(Alone(adapted), 0, adapters=adapters)
    runs = [run_all(adapted, seed, adapters=adapters) for seed in (1, 2, 3)]
    assert all(run.answers == alone.answers for run in runs)
    assert alone.answers != run_all(Alone(adapted), 0).answers
    plans = [record.launch.plan for run in runs for record in run.records]
    keys = [
        tuple({row.sequence.adapter.key for row in rows} for rows in (plan.decodes, plan.prefills))
        for plan in plans
        if plan.kind is LaunchKind.PREFILL
    ]
    assert any(len(decodes) > 1 for decodes, _ in keys), "no decodes of different adapters"
    assert any(len(prompts) > 1 for _, prompts in keys), "no prompts of different adapters"


@pytest.mark.parametrize("count", [-1, 33])
def test_more_prompts_than_could_share_are_refused(count):
    """All prompts are sampled in one pass, which limits them; the error names the field."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, max_prefill_rows=count))
    assert caught.value.metadata["field"] == "max_prefill_rows"


@pytest.mark.parametrize("count", [0, 5])
def test_more_images_than_fit_are_refused(count):
    """Each image has page-locked memory of its own, which limits them."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, images_per_launch=count))
    assert caught.value.metadata["field"] == "images_per_launch"


def test_launches_are_not_shared_without_a_gain(adapted):
    """By default prompts that would run one after another have separate launches."""
    limits = adapted.runner.limits
    assert limits.prompts == CONFIG.max_prefill_rows
    default = assemble(msgspec.structs.replace(adapted.config, max_prefill_rows=0))
    assert default.runner.limits.prompts == 1
    default.device.close()
