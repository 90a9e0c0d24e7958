"""On a GPU: streams keep their order, graphs and pipelines change nothing, and wait for nothing."""

from __future__ import annotations

import collections
import dataclasses
import gc
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.device.select import open_device
from legato_engine.models.frontend import PreparedImage
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.scheduler.batch import LaunchKind, Plan, StepRecord
from legato_engine.scheduler.decode import DecodePlanner
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence, tokens_of
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectOutput,
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

from tests.engine.models.against_transformers import Engine
from tests.engine.scheduler.world import num_images
from tests.engine.test_grammar import WITH_RUNS, without_forced
from tests.gpu.inputs import shapes_picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DATED_WITHIN = 200_000  # nanoseconds: what clocks drift in a second, and the host's waking up
TASKS: tuple[TaskSpec, ...] = (
    DetectSpec(object="red circle"),
    DetectSpec(object="blue square"),
    CaptionSpec(),
    QuerySpec(question="How many red circles are there?"),
)


class Results(SilentSink):
    """Keeps every request's result."""

    def __init__(self) -> None:
        self.by_id: dict[str, TaskOutput] = {}

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Keep it."""
        self.by_id[sequence.request.request_id.caller_id] = sequence.task.result(finish_reason)


def assembled(device: str, *, graphs: bool = True, dtype: str = "f32") -> Assembly:
    """legato-tiny, in float32 so that both devices agree."""
    return assemble(
        EngineConfig(
            model="legato-tiny", device=device, dtype=dtype, max_running=4, cuda_graphs=graphs
        )
    )


class Told(SilentSink):
    """Keeps every request's tokens."""

    def __init__(self) -> None:
        self.by_id: dict[str, list[TokenInfo]] = collections.defaultdict(list)

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """Keep them."""
        self.by_id[sequence.request.request_id.caller_id] += tokens_of(events)


def tokens(assembly: Assembly) -> list[list[TokenInfo]]:
    """Run every task greedily; return tokens and log-probabilities."""
    told = Told()
    scheduler = assembly.scheduler(told, pipeline_depth=2)
    info = ImageProperties(image_id="shapes", width=640, height=480, cache_hit=False)
    image = assembly.frontend.prepare_image(shapes_picture(), "shapes", info)
    for index, task in enumerate(TASKS):
        request = Request(
            request_id=RequestKey(str(index)),
            task=task,
            image=CachedImageRef(image_id="shapes"),
            sampling=SamplingParams(temperature=0.0, max_tokens=48),
            return_tokens=True,
            logprobs=True,
        )
        scheduler.submit(make_sequence(assembly.frontend, request, image))
    scheduler.drain()
    return [told.by_id[str(index)] for index in range(len(TASKS))]


def answers(assembly: Assembly, depth: int, temperature: float = 0.0) -> dict[str, TaskOutput]:
    """Run every task twice, all together."""
    sink = Results()
    scheduler = assembly.scheduler(sink, pipeline_depth=depth)
    info = ImageProperties(image_id="shapes", width=640, height=480, cache_hit=False)
    image = assembly.frontend.prepare_image(shapes_picture(), "shapes", info)
    for index, task in enumerate(TASKS * 2):
        request = Request(
            request_id=RequestKey(str(index)),
            task=task,
            image=CachedImageRef(image_id="shapes"),
            sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=48),
        )
        scheduler.submit(make_sequence(assembly.frontend, request, image))
    scheduler.drain()
    load = scheduler.load()
    assert (load.running, load.waiting, load.inflight, load.rows_used, load.pages_used) == (0,) * 5
    return sink.by_id


@pytest.fixture(scope="module")
def cuda() -> Iterator[Assembly]:
    """legato-tiny on the GPU with graphs."""
    assembly = assembled("cuda")
    yield assembly
    assembly.device.close()


def test_a_capture_runs_behind_what_other_streams_do():
    """A capture's first run reads what another stream has written before it."""
    device = open_device("cuda:0", 0)
    given, taken = (torch.zeros(1, device=device.torch_device) for _ in range(2))
    other = torch.cuda.Stream(device.torch_device)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        given.fill_(1.0)

    def take() -> None:
        taken.copy_(given)

    device.capture(take)
    assert taken.item() == 1.0
    device.close()


def test_streams_order_and_overlap() -> None:
    """A copy that waits for an event sees what compute wrote, and event times follow the order."""
    device = open_device("cuda")
    value = torch.zeros(1 << 20, device=device.torch_device)
    host = device.pinned((1 << 20,), torch.float32)
    start = device.compute.record()
    for _ in range(200):
        device.compute.submit(lambda: (value.add_(1.0), None)[1])
    written = device.compute.record()
    device.copy.wait_event(written)
    device.copy.submit(lambda: (host.copy_(value, non_blocking=True), None)[1])
    copied = device.copy.record()
    copied.wait()
    assert host.eq(200.0).all()
    assert start.time_ns() < written.time_ns() < copied.time_ns()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_depth_changes_no_token(cuda: Assembly, temperature: float) -> None:
    """Blocking and pipelined answers are equal, greedy and with seeds."""
    assert answers(cuda, 1, temperature) == answers(cuda, 2, temperature)


def test_graphs_change_no_token(cuda: Assembly) -> None:
    """Captured and eager decode give the same answers."""
    assert answers(cuda, 2) == answers(assembled("cuda", graphs=False), 2)


def test_answers_are_those_of_the_cpu(cuda: Assembly) -> None:
    """Texts are equal and boxes agree within three bins, in float32."""
    on_cpu = answers(assembled("cpu"), 2)
    for key, result in answers(cuda, 2).items():
        expected = on_cpu[key]
        if isinstance(result, DetectOutput) and isinstance(expected, DetectOutput):
            assert len(result.objects) == len(expected.objects) > 0
            for ours, theirs in zip(result.objects, expected.objects, strict=True):
                assert _corners(ours.box) == pytest.approx(_corners(theirs.box), abs=3 / 1024)
        else:
            assert result == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 5e-3), ("bf16", 0.2)])
def test_logprobs_are_those_of_the_cpu(dtype: str, tolerance: float) -> None:
    """While both devices take the same tokens, log-probabilities agree, by torch and by kernels."""
    told = {}
    for device, kind in (("cpu", "f32"), ("cuda", dtype)):
        assembly = assembled(device, dtype=kind)
        told[device] = tokens(assembly)
        assembly.device.close()
    num_compared = 0
    for expected, seen in zip(told["cpu"], told["cuda"], strict=True):
        for theirs, ours in zip(expected, seen, strict=False):
            if theirs.token_id != ours.token_id or theirs.coordinate != ours.coordinate:
                break
            assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerance)
            num_compared += 1
    assert num_compared >= 10


def test_events_are_dated_between_their_record_and_their_sight() -> None:
    """For some seconds, in which the clocks of device and host drift apart."""
    device = open_device("cuda")
    begun, ended = device.compute.record(), device.compute.record()
    stop = time.monotonic() + 4
    while time.monotonic() < stop:
        before = time.perf_counter_ns()
        begun = device.compute.record(begun)
        device.compute.submit(lambda: torch.cuda._sleep(1_000_000))
        ended = device.compute.record(ended)
        ended.wait()
        after = time.perf_counter_ns()
        assert before <= begun.time_ns() < ended.time_ns() < after + DATED_WITHIN
    device.close()


def test_a_warm_engine_takes_no_more_memory(cuda: Assembly) -> None:
    """A whole batch of answers on a warm engine reserves no more device memory."""
    answers(cuda, 2)
    before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
    answers(cuda, 2)
    assert (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()) == before


def _corners(box: object) -> tuple[float, ...]:
    return tuple(getattr(box, name) for name in ("x_min", "y_min", "x_max", "y_max"))


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
    monkeypatch.setattr(DecodePlanner, "is_streaming", False)
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


def test_graphs_change_no_token_of_a_pipeline(large: Assembly) -> None:
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


@pytest.mark.parametrize("speculation", ["off", "seed"])
def test_forced_tokens_change_no_answer(monkeypatch: pytest.MonkeyPatch, speculation: str) -> None:
    """Tokens and log-probabilities are those of single steps, with one launch in flight or two."""
    options = {"logprobs": True, "max_tokens": 120, "temperature": 1.0, "seed": 3}
    with Engine("legato-tiny", "", device="cuda", speculation=speculation) as engine:
        expected = without_forced(engine, monkeypatch, WITH_RUNS, **options)
        for depth in (1, 2):
            steps: list[StepRecord] = []
            answers = engine.ask(WITH_RUNS, depth, steps=steps, **options)
            assert answers.told == expected.told
            assert any(step.forced for step in steps)
