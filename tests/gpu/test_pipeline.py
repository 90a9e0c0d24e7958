"""The pipelined loop on a GPU: no synchronisation, no allocation, the same answers."""

from __future__ import annotations

import collections
import dataclasses
import gc
from collections.abc import Iterator
from collections.abc import Sequence as Many

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.frontend import PreparedImage
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.scheduler.batch import LaunchKind, Plan, StepRecord
from legato_engine.scheduler.decode import DecodePlanner
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence, tokens_of
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    Event,
    FinishReason,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TaskOutput,
    TaskSpec,
    TokenInfo,
)
from PIL import Image

from tests.engine.scheduler.world import num_images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Watch(SilentSink):
    """Keeps every request's result, its tokens if reported, and the plans of all launches."""

    def __init__(self) -> None:
        self.results: dict[str, TaskOutput] = {}
        self.tokens: dict[str, list[TokenInfo]] = collections.defaultdict(list)
        self.plans: list[Plan] = []

    @property
    def kinds(self) -> list[LaunchKind]:
        """The kinds of all launches."""
        return [plan.kind for plan in self.plans]

    @property
    def shared(self) -> tuple[int, int]:
        """Count launches with mixed decodes, and with several prompts."""
        riding = [plan for plan in self.plans if plan.num_mixed_decodes]
        return len(riding), sum(len(plan.prefills) > 1 for plan in self.plans)

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """Keep the tokens."""
        self.tokens[sequence.request.request_id.caller_id] += tokens_of(events)

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Keep the result."""
        self.results[sequence.request.request_id.caller_id] = sequence.task.result(finish_reason)

    def committed(self, record: StepRecord) -> None:
        """Keep the plan."""
        self.plans.append(record.launch.plan)


def prepared_image(assembly: Assembly, seed: int) -> PreparedImage:
    """850x600 of noise: nine crops for Moondream 2."""
    pixels = np.random.default_rng(seed).integers(0, 256, (600, 850, 3), dtype=np.uint8)
    info = ImageProperties(image_id=str(seed), width=850, height=600, cache_hit=False)
    return assembly.frontend.prepare_image(Image.fromarray(pixels), f"noise-{seed}", info)


def run(
    assembly: Assembly,
    depth: int,
    *,
    crops: int = 5,
    temperature: float = 0.0,
    first: int = 0,
    count: int = 6,
    steps: int = 4,
    shares: bool = True,
    logprobs: bool = False,
) -> Watch:
    """Submit images while other requests decode, one every few steps; `first` has no image."""
    config = msgspec.structs.replace(assembly.config, crops_per_launch=crops)
    watch = Watch()
    changed = dataclasses.replace(assembly, config=config)
    scheduler = changed.scheduler(
        watch, pipeline_depth=depth, shares=shares, observer=watch.committed
    )
    tasks: list[TaskSpec] = [
        QuerySpec(question="What?" * 9),
        DetectSpec(object="cat"),
        CaptionSpec(),
    ]
    for index in range(first, count):
        image = prepared_image(assembly, index % 3) if index != 0 else None
        task = tasks[index % 3] if index else QuerySpec(question="x" * 99)
        request = Request(
            request_id=RequestKey(str(index)),
            task=task,
            image=CachedImageRef(image_id="any") if image else None,
            sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=24),
            return_tokens=logprobs,
            logprobs=logprobs,
        )
        scheduler.submit(make_sequence(assembly.frontend, request, image))
        for _ in range(steps):
            scheduler.step()
    scheduler.drain()
    load = scheduler.load()
    assert (load.running, load.waiting, load.inflight, load.rows_used, load.pages_used) == (0,) * 5
    return watch


@pytest.fixture(scope="module")
def large() -> Iterator[Assembly]:
    """Moondream 2's shape with random weights, kernels and graphs."""
    assembly = assemble(
        EngineConfig(model="moondream2", random_weights=True, device="cuda", max_running=6)
    )
    yield assembly
    assembly.device.close()
    del assembly
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neither_depth_nor_splitting_changes_a_token(large: Assembly, temperature: float) -> None:
    """Blocking and pipelined, images whole and in groups of crops: the same answers."""
    expected = run(large, 1, crops=0, temperature=temperature)
    assert LaunchKind.ENCODE not in expected.kinds
    for depth, crops in ((2, 0), (2, 4), (1, 4)):
        watch = run(large, depth, crops=crops, temperature=temperature)
        assert watch.results == expected.results
        assert (LaunchKind.ENCODE in watch.kinds) == (crops > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sharing_changes_no_bit(large: Assembly, temperature: float) -> None:
    """Prompts and decodes that share passes have the same tokens and log-probabilities."""
    expected = run(
        large, 1, temperature=temperature, count=12, crops=0, shares=False, logprobs=True
    )
    assert expected.shared == (0, 0)
    for depth, steps in ((1, 3), (2, 3), (2, 0), (2, 1)):
        watch = run(
            large,
            depth,
            temperature=temperature,
            count=12,
            steps=steps,
            crops=0,
            logprobs=True,
        )
        assert watch.tokens == expected.tokens
        assert watch.results == expected.results
        assert watch.shared[0] > 0
        assert watch.shared[1] > 0 or steps > 0


def cached_images(assembly: Assembly, watch: Watch) -> dict[str, torch.Tensor]:
    """[2, L, H, P, E]: every image's cached keys and values after a run."""
    kv, kept = assembly.kv, {}
    for row in (row for plan in watch.plans for row in plan.prefills):
        sequence = row.sequence
        if row.encodes:
            assert sequence.prefix_key is not None, "images are found by their content"
            pages = list(row.work.compute_pages)
            both = torch.stack([kv.k_LNHSE[:, pages], kv.v_LNHSE[:, pages]])
            flat = both.transpose(2, 3).flatten(3, 4)
            kept[sequence.prefix_key] = flat[:, :, :, : sequence.prefix_length]
    return kept


@pytest.mark.parametrize(("first", "together"), [(0, 2), (1, 3)])
def test_images_of_one_launch_change_no_bit(
    large: Assembly, monkeypatch: pytest.MonkeyPatch, first: int, together: int
) -> None:
    """Images that share a launch have the same keys, values and tokens as one by one.

    With a long question, there is room for two.
    """
    expected = run(large, 1, first=first, count=12, crops=0, shares=False, logprobs=True)
    images = cached_images(large, expected)
    assert len(images) == 3
    limits = dataclasses.replace(large.runner.limits, min_queue_length=0)
    monkeypatch.setattr(ModelRunner, "limits", limits)
    monkeypatch.setattr(DecodePlanner, "streaming", False)
    for depth in (1, 2):
        watch = run(large, depth, first=first, count=12, steps=0, crops=0, logprobs=True)
        assert watch.tokens == expected.tokens
        assert watch.results == expected.results
        assert max(map(num_images, watch.plans)) == together < limits.images
        assert sum(map(num_images, watch.plans)) == 3
        kept = cached_images(large, watch)
        assert kept.keys() == images.keys()
        assert all(torch.equal(kept[key], images[key]) for key in kept)


def test_a_warm_loop_never_synchronises_nor_allocates(large: Assembly) -> None:
    """Torch raises on any synchronisation, and its allocator is never called."""
    run(large, 2)
    run(large, 2, steps=0)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        watches = run(large, 2), run(large, 2, steps=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert watches[0].shared[0] > 0
    assert min(watches[1].shared) > 0


def test_graphs_change_no_token(large: Assembly) -> None:
    """The same kernels without graphs give the same answers."""
    eager = assemble(
        EngineConfig(
            model="moondream2",
            random_weights=True,
            device="cuda",
            max_running=4,
            cuda_graphs=False,
            num_pages=2048,
        )
    )
    assert run(eager, 2).results == run(large, 2).results
