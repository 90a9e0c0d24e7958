"""The kernel backend, with and without adapters, on torch stand-ins for kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.core.assembly import assemble
from legato_engine.models.base import Model
from legato_engine.models.moondream.preprocess import crop_image
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.paged_attention import DecodeBatch
from legato_engine.runtime import kernel_backend
from legato_engine.runtime.decode_slot import MAX_PASSES
from legato_engine.runtime.kv_pool import allocate
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.runtime.sampler import greedy
from legato_engine.scheduler.scheduler import NUM_SLOTS
from legato_engine.types import CaptionSpec, DetectSpec, PixelFormat, QuerySpec, RawImage
from PIL import Image

from benchmarks.decode.loops import randomly
from tests.adapters import random_adapter, safetensors_file
from tests.engine.core.test_memory import Alone, run_all, shared
from tests.engine.core.world import CONFIG, World, png
from tests.engine.scheduler.world import num_images
from tests.engine.speculative.test_speculation import Run
from tests.fake_device import GraphDevice
from tests.gpu.guard import GraphsOnly

TEXT = tiny_random_config().text
NAMES = ("", "x", "", "y", "x")


class TorchKernels:
    """`StepKernels` of the model's own operations, which count steps and groups."""

    def __init__(self, model, kv, bank):
        self.model, self.kv, self.bank = model, kv, bank
        self.steps = {True: 0, False: 0}
        self.groups = []  # how many each step was laid out for

    @property
    def num_steps(self):
        """All steps."""
        return sum(self.steps.values())

    def forward(self, inputs, hidden_BD, logits_BV):
        """Run one step, with adapters if rows may have some."""
        slot_R, rows = inputs.adapter_slot_R, None
        self.steps[slot_R is not None] += 1
        self.groups.append(inputs.num_groups)
        if slot_R is not None:
            rows = self.bank.rows(slot_R[inputs.row_B], self.bank.ranks[-1])
        sampled_B = inputs.source_B >= 0
        source_B = inputs.source_B.clamp(min=0)
        token_B = torch.where(sampled_B, inputs.token_R[source_B], inputs.prompt_token_B)
        payload_B2 = torch.where(
            sampled_B[:, None], inputs.payload_R2[source_B], inputs.prompt_payload_B2
        )
        where = DecodeBatch(inputs.position_B, inputs.page_table_RM[inputs.row_B], rows)
        x_BD = self.model.decode(self.model.embed(token_B, payload_B2), where, self.kv)
        hidden_BD.copy_(x_BD)
        if logits_BV is not None:
            logits_BV.copy_(self.model.logits(x_BD))

    def values(self, state, sampled):
        """Write the values of sampled tokens to the batch and to their rows."""
        constraint_B = sampled.constraint_S[: len(sampled.token_B)]
        if sampled.entry_B is not None:
            constraint_B = sampled.constraint_S[sampled.entry_B]
        logits_BV = sampled.logits_BV + sampled.constraints_CV[constraint_B]
        token_B = sampled.token_B.clamp(min=0)
        payload_B2, certainty_B2 = self.model.values(sampled.hidden_BD, token_B, logits_BV)
        sampled.payload_B2.copy_(payload_B2)
        sampled.certainty_B2.copy_(certainty_B2)
        state.payload_R2[sampled.row_B] = payload_B2


class TorchEncoder:
    """An `ImageEncoder` of the model's own operations, which counts images per pass.

    With a `flaw`, images in one pass have other bits than alone.
    """

    max_crops = 4

    def __init__(self, assembly, max_images, flaw=0.0):
        self.vision = tiny_random_config().vision
        self.model, self.flaw = assembly.model, flaw
        num_images = NUM_SLOTS * max_images
        length = assembly.frontend.prefix_length(has_image=True)
        self.embeddings_CPD = torch.zeros(num_images, length, assembly.model.width)
        self.embeddings_CPD[:, 0] = assembly.model.prefix_embeddings(None)
        self.staged = [None] * num_images
        self.uploaded = None
        self.counts = []

    def stage(self, place, image):
        """Keep the image as staged."""
        self.staged[place] = image

    def upload(self, place):
        """Keep the image as uploaded, one at a time."""
        self.uploaded = self.staged[place]

    def cut(self):
        """Do nothing: `finish` runs the whole encoder."""

    def gather(self, *crops, **source):
        """See `cut`."""

    encode = scatter = gather

    def finish(self, place):
        """Embed the image uploaded last; in warm-up there is none."""
        image = self.uploaded
        if image is not None:
            pixels_HWC = Image.fromarray(image.pixels.pixels_HWC)
            cut = dataclasses.replace(image, pixels=crop_image(pixels_HWC, self.vision))
            self.embeddings_CPD[place] = self.model.prefix_embeddings(cut)
        return self.embeddings_CPD[place]

    def cache(self, first, pages_CM, kv):
        """Run the decoder over all images in one pass."""
        self.counts.append(len(pages_CM))
        x_CPD = self.embeddings_CPD[first : first + len(pages_CM)]
        self.model._network.text.cache_stacked(x_CPD + self.flaw, pages_CM, kv)


class GreedySampler:
    """A stand-in for the sampling kernel."""

    def __init__(self, vocab_size):
        pass

    def sample(
        self,
        state,
        logits_BV,
        table_CV,
        constraint_S,
        row_B,
        position_B,
        out_B,
        *,
        entry_B,
    ):
        """Choose the best token that the constraint allows."""
        constraint_B = constraint_S[: len(out_B)]
        if entry_B is not None:
            constraint_B = constraint_S[entry_B[: len(out_B)]]
        out_B.copy_(greedy(logits_BV + table_CV[constraint_B]))
        state.token_R[row_B] = out_B


@pytest.fixture
def assembly(tmp_path):
    """A model with two adapters."""
    for seed, name in enumerate("xy"):
        data = safetensors_file(random_adapter(TEXT, 4 + 8 * seed, seed))
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    config = msgspec.structs.replace(CONFIG, max_running=7, max_waiting=32, adapters=str(tmp_path))
    # The launches of a GPU, whose layers are torch's here.
    made = assemble(msgspec.structs.replace(config, cpu_kernels="torch"))
    yield made
    made.device.close()


def with_kernels(assembly, *, buckets=(8,), max_prompts=1, max_images=1, encoder=None, loops=False):
    """The same model on a `KernelBackend`, and its kernels; images uncropped for an `encoder`."""
    made = []

    class WithKernels:
        def __getattr__(self, name):
            return getattr(assembly.model, name)

        def step_kernels(self, kv, adapters):
            """Return the stand-in."""
            made.append(TorchKernels(assembly.model, kv, adapters))
            return made[0]

        def image_encoder(self, pinned, num_images):
            """Return the given encoder, if any."""
            return encoder

    config = assembly.config
    kv = allocate(assembly.model, assembly.device, assembly.num_pages, config.page_size)
    runner = ModelRunner(
        cast(Model, WithKernels()),
        assembly.device,
        kv,
        max_running=config.max_running,
        buckets=buckets,
        adapters=assembly.bank,
        loops=loops,
        max_prompts=max_prompts,
        max_images=max_images,
    )
    runner.warm_up()
    frontend = assembly.frontend
    if runner.encodes_images:
        frontend = frontend.resizing_on_device()
    return dataclasses.replace(assembly, runner=runner, frontend=frontend), made[0]


def answers(assembly):
    """Run requests with and without adapters together; kernels' warm-up has made all works."""
    world = World(assembly)
    made = captured(assembly.runner)
    tasks = (DetectSpec(object="x"), CaptionSpec(), QuerySpec(question="what?" * 12))
    names = []
    for number, adapter in enumerate(NAMES * 2):
        names.append(f"r-{number}")
        image = world.encoded(png(number // 2)) if number % 3 != 2 else None
        world.submit(names[-1], tasks[number % 3], image, adapter=adapter)
    results = [done.result for done in world.run(*names)]
    world.close()
    if isinstance(assembly.runner._backend, kernel_backend.KernelBackend):
        assert captured(assembly.runner) == made
    return results


def test_adapters_answer_as_by_torch(assembly, monkeypatch):
    """Every prompt and step runs by kernels, and rows with adapters get torch's answers."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    expected = answers(assembly)
    fused, kernels = with_kernels(assembly)
    before = dict(kernels.steps)
    assert answers(fused) == expected
    assert all(kernels.steps[adapted] > before[adapted] for adapted in before)


@pytest.mark.parametrize("buckets", [pytest.param((8,), marks=pytest.mark.slow), (8, 16)])
def test_passes_are_shared_and_change_no_answer(assembly, monkeypatch, buckets):
    """Prompts and decodes that share passes get the answers they get alone, in fewer passes."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    folder = Path(assembly.config.adapters)
    tuned = assembly.model.read_adapter((folder / "x.safetensors").read_bytes(), "x", 16)
    alone, alone_kernels = with_kernels(assembly, buckets=buckets)
    together, kernels = with_kernels(assembly, buckets=buckets, max_prompts=3)
    for seed, adapters in ((1, {}), (2, {"boxes": tuned})):
        steps = alone_kernels.num_steps, kernels.num_steps
        expected = run_all(Alone(alone), 0, adapters=adapters)
        run = run_all(together, seed, adapters=adapters)
        assert run.answers == expected.answers
        assert min(shared(run)) > 0
        lengths = [len(sequence.prompt) for sequence in run.sequences.values()]
        limits = together.runner.limits
        assert min(lengths) < limits.sampled < max(lengths), "one and several passes"
        assert kernels.num_steps - steps[1] < alone_kernels.num_steps - steps[0]


def captured(runner):
    """The shapes of all work so far: a GPU must meet none after its warm-up."""
    return set(runner._resources.graphs._captured)


def whole(runner, monkeypatch):
    """Let prompts be one launch, of several passes too."""
    limits = dataclasses.replace(runner.limits, pass_tokens=0, long_chunk_tokens=0)
    monkeypatch.setattr(runner._backend, "limits", limits)


def joined(assembly, second):
    """A finished run of two questions, the second of which comes while the first is answered."""
    run = Run(assembly, max_tokens=60)
    run.submit("first", QuerySpec(question="one"))
    while run.sequences["first"].num_committed < 12:
        run.scheduler.step()
    run.submit("second", QuerySpec(question=second))
    run.finish()
    return run


@pytest.mark.parametrize("second", ["two, too", "two " * 10])
def test_prompts_join_loops_and_change_no_answer(assembly, monkeypatch, second):
    """Loops are the default with kernels; a prompt that ends one shares passes with its rows."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    alone, _ = with_kernels(assembly, buckets=(8, 16))
    looping, _ = with_kernels(assembly, buckets=(8, 16), max_prompts=3, loops=None)
    whole(looping.runner, monkeypatch)
    made = captured(looping.runner)
    assert not alone.runner.decodes_by_loops
    assert looping.runner.decodes_by_loops
    runs = [joined(each, second) for each in (alone, looping)]
    assert runs[0].answers == runs[1].answers
    plans = [record.launch.plan for record in runs[1].records]
    assert any(plan.behind and plan.prefills for plan in plans)
    assert captured(looping.runner) == made


@pytest.mark.parametrize(("second", "num_passes"), [("two, too", 1), ("two " * 10, 3)])
def test_a_prompt_behind_a_loop_is_few_calls(assembly, monkeypatch, second, num_passes):
    """A copy and a forward for each pass, and one work for all that changes before."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    looping, _ = with_kernels(assembly, buckets=(8, 16), max_prompts=3, loops=None)
    whole(looping.runner, monkeypatch)
    compute, forward, calls = looping.device.compute, looping.runner.forward, []

    def counting(name):
        call = getattr(compute, name)

        def counted_call(*given):
            calls.append(name)
            call(*given)

        return counted_call

    def counted(launch):
        with monkeypatch.context() as patch:
            if launch.plan.behind and launch.plan.prefills:
                for name in ("copy", "submit"):
                    patch.setattr(compute, name, counting(name))
            forward(launch)

    monkeypatch.setattr(looping.runner, "forward", counted)
    joined(looping, second)
    places_apart = num_passes > 1
    assert calls.count("copy") == num_passes
    assert calls.count("submit") == num_passes + 1 + places_apart


@pytest.mark.parametrize("steps", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_requests_that_come_and_go_change_no_answer(assembly, monkeypatch, steps):
    """Every skill beside loops, arrivals and aborts at any step; the warm-up has made all works."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    encoder = TorchEncoder(assembly, 2)
    looping, _ = with_kernels(
        assembly, buckets=(8, 16, 32), max_prompts=3, loops=None, encoder=encoder
    )
    made = captured(looping.runner)
    totals = randomly(looping, steps, seed=12)
    assert totals["different"] == 0
    assert min(totals["answers"], totals["aborted"]) >= steps / 100
    assert totals["launches"] < totals["steps"]
    assert captured(looping.runner) == made


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_in_parts_changes_no_answer(assembly, monkeypatch, depth):
    """A prompt that comes while others decode, too long to share one pass with them."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    alone, _ = with_kernels(assembly, buckets=(8, 32))
    together, _ = with_kernels(assembly, buckets=(8, 32), max_prompts=3)
    given = []
    for each in (alone, together):
        run = Run(each, max_tokens=24, depth=depth)
        for name in ("one", "two"):
            run.submit(name, QuerySpec(question=name))
        while min(each.num_committed for each in run.sequences.values()) < 4:
            run.scheduler.step()
        run.submit("late", QuerySpec(question="what is there? " * 2))
        run.finish()
        given.append(run.answers)
    assert given[0] == given[1]
    parts = [record.launch.plan for record in run.records if record.launch.plan.has_partial_prefill]
    assert [len(plan.decodes) for plan in parts] == [2]


def run_as_steps(assembly, monkeypatch, most):
    """Let prompts of up to so many tokens run as steps."""
    backend = assembly.runner._backend
    limits = dataclasses.replace(backend.limits, chunk_above=most)
    monkeypatch.setattr(backend, "limits", limits)


def test_a_long_prompt_in_parts_changes_no_answer(assembly, monkeypatch):
    """A prompt's passes are launches between others' decode steps and change no answer.

    Passes begin at the same tokens.
    """
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    monkeypatch.setattr(kernel_backend, "CHUNK", 32)
    fused, _ = with_kernels(assembly, buckets=(8,), max_prompts=3)
    run_as_steps(fused, monkeypatch, 32)
    given, plans = [], []
    for is_cut in (False, True):
        run = Run(fused, max_tokens=24)
        run.submit("one", QuerySpec(question="one"))
        while is_cut and run.sequences["one"].num_committed < 4:
            run.scheduler.step()
        while not is_cut and not run.scheduler.idle:
            run.scheduler.step()
        run.submit("late", QuerySpec(question="x" * 60))
        run.finish()
        given.append(run.answers)
        plans.append([record.launch.plan for record in run.records])
    assert given[0] == given[1]
    whole, parts = ([plan for plan in each if plan.prefills] for each in plans)
    assert [plan.has_partial_prefill for plan in whole] == [False, False]
    assert [plan.has_partial_prefill for plan in parts] == [False, True, True, False]
    assert not any(plan.decodes for plan in parts)
    sizes = [row.num_tokens for plan in parts[1:] for row in plan.prefills]
    assert sizes[:2] == [31, 32], "BOS is computed with the first"
    first = plans[1].index(parts[1])
    kinds = [bool(plan.decodes) for plan in plans[1][first : first + 5]]
    assert kinds == [False, True, False, True, False]


def test_every_launch_is_graphs_and_copies(assembly, monkeypatch):
    """Nothing else runs of short and long prompts, images and new adapters."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    monkeypatch.setattr(kernel_backend, "CHUNK", 32)
    assembly = dataclasses.replace(assembly, device=GraphDevice())
    encoder = TorchEncoder(assembly, 1)
    fused, _ = with_kernels(assembly, buckets=(8,), max_prompts=3, encoder=encoder)
    run_as_steps(fused, monkeypatch, 32)
    data = (Path(assembly.config.adapters) / "x.safetensors").read_bytes()
    tuned, given = assembly.model.read_adapter(data, "x", 16), []
    for quiet in (True, False):
        run, made = Run(fused, max_tokens=12), captured(fused.runner)
        with GraphsOnly("cpu") if quiet else contextlib.nullcontext():
            for question in ("x", "x" * 60):
                run.submit(f"{question} plain", QuerySpec(question=question))
                run.submit(f"{question} image", QuerySpec(question=question), 1)
                run.submit(f"{question} tuned", QuerySpec(question=question), 2, adapter=tuned)
            run.finish()
        assert captured(fused.runner) == made
        given.append(run.answers)
    assert given[0] == given[1]


def test_a_long_prompt_alone_runs_as_steps(assembly, monkeypatch):
    """A prompt too long for a shared launch runs as steps, up to a bound.

    Its answer is the same on either side of it, in passes of fixed shape or by torch alone.
    """
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    fused, kernels = with_kernels(assembly, max_prompts=3)
    shared_tokens = fused.runner.limits.tokens
    given = []
    for most, chunks in ((MAX_PASSES, True), (1, True), (1, False)):
        run_as_steps(fused, monkeypatch, 8 * most)
        if not chunks:
            monkeypatch.setattr(fused.runner._backend, "_long", None)
        before, run = kernels.num_steps, Run(fused, max_tokens=1)
        run.submit("long", QuerySpec(question="x" * (2 * shared_tokens)))
        run.finish()
        given.append(run.answers)
        num_tokens = 1 + len(run.sequences["long"].prompt)  # with BOS
        assert 2 * shared_tokens < num_tokens <= 8 * MAX_PASSES
        assert kernels.num_steps - before == (-(-num_tokens // 8) if most > 1 else 0)
    assert given[0] == given[1] == given[2]


@pytest.mark.parametrize(("question", "is_long"), [("x", 0), ("x" * 60, 1)])
def test_a_long_answer_is_recomputed_as_steps(assembly, monkeypatch, question, is_long):
    """After a preemption an answer of more tokens than staged steps runs as steps again.

    Only a prompt too long for steps does not.
    """
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    fused, kernels = with_kernels(assembly)
    run_as_steps(fused, monkeypatch, 32)
    monkeypatch.setattr(kernel_backend, "MAX_PASSES", 2)
    long_prompts = []
    long = fused.runner._backend._long
    run_long = long.run

    def counted(*given, **how):
        long_prompts.append(given)
        run_long(*given, **how)

    monkeypatch.setattr(long, "run", counted)

    def asked(preempted_at):
        run = Run(fused, max_tokens=70)
        run.submit("long", QuerySpec(question=question))
        sequence = run.sequences["long"]
        while sequence.num_committed < preempted_at:
            run.scheduler.step()
        if preempted_at:
            while run.scheduler.load().inflight:
                run.scheduler._commit(run.scheduler._pipeline.oldest())
            run.scheduler._running._requeue(sequence)
            manager = run.scheduler._manager
            manager._tree.evict_until_free(manager.pages_total)
        return run.finish().answers

    plain = asked(0)
    del long_prompts[:]
    before = kernels.num_steps
    assert asked(60) == plain
    assert len(long_prompts) == 2 * is_long, "for the request, and again after the preemption"
    assert kernels.num_steps - before >= 69 + 60 // 8


def test_images_share_a_launch_and_change_no_answer(assembly, monkeypatch):
    """Images of one launch pass the decoder together if that keeps their bits.

    Otherwise they pass one after another. Each fills its own pages, and prompts of cached images
    share the launch.
    """
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    monkeypatch.setattr(kernel_backend, "_MIN_QUEUE_LENGTH", 0)
    whole = msgspec.structs.replace(assembly.config, crops_per_launch=0)
    assembly = dataclasses.replace(assembly, config=whole)
    folder = Path(assembly.config.adapters)
    tuned = assembly.model.read_adapter((folder / "x.safetensors").read_bytes(), "x", 16)
    given = []
    for most, flaw, together in ((1, 0.0, 0), (3, 0.0, 2), (3, 0.01, 0)):
        encoder = TorchEncoder(assembly, most, flaw)
        fused, _ = with_kernels(
            assembly, buckets=(8, 16), max_prompts=4, max_images=most, encoder=encoder
        )
        assert bool(encoder.counts) == (most > 1), "measured in advance"
        del encoder.counts[:]
        run = Run(fused, max_tokens=6)
        for number, image in enumerate((0, 0, 1, 2, 3, 1, None, 4, 5)):
            adapter = tuned if number in (5, 7) else None
            run.submit(
                str(number), QuerySpec(question="what?"), image, adapter=adapter, deltas=False
            )
        run.finish()
        plans = [record.launch.plan for record in run.records]
        assert max(map(num_images, plans)) == most
        assert any(len(plan.prefills) > most for plan in plans), (
            "questions about cached images share the launch"
        )
        assert sum(map(num_images, plans)) == 7, "each image once, for each adapter"
        assert max(encoder.counts, default=0) == together
        given.append(run.answers)
    assert given[0] == given[1] == given[2]
    assert len({answer.result for answer in given[0].values()}) > 1, "images differ"


def raw_noise(world, seed):
    """Raw pixels, which are decoded within the engine's thread, so that requests overlap."""
    data = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8).tobytes()
    return RawImage(
        blob=world.blobs.put(data), width=40, height=30, row_stride=120, format=PixelFormat.RGB8
    )


def test_steps_of_few_groups_are_laid_out_for_them(assembly, monkeypatch):
    """The bucket's own layout runs only if its tokens have more groups than other layouts."""
    monkeypatch.setattr(kernel_backend, "Sampler", GreedySampler)
    fused, kernels = with_kernels(assembly)
    assert set(kernels.groups) == {1, 2, 8}, "all of them are captured beforehand"
    for rows, layout in ((1, 1), (2, 2), (3, 8), (5, 8)):
        del kernels.groups[:]
        world = World(fused)
        names = [f"{rows}-{number}" for number in range(rows)]
        for number, name in enumerate(names):
            world.submit(name, CaptionSpec(), raw_noise(world, number))
        world.run(*names)
        world.close()
        assert layout in kernels.groups
        assert max(kernels.groups) == layout, "a prompt of up to eight tokens is one group"
