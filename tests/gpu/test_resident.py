"""On a GPU: the resident kernel's steps are the model's, and have one result however they run."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from legato_engine.kernels.accelerated import Sampler
from legato_engine.kernels.cuda.resident import RING_STAGES
from legato_engine.resident.program import Kind, Program, counter
from legato_engine.resident.sizes import LEGATO_TINY, MOONDREAM2, ModelSizes

from benchmarks.resident_kernel import ResidentKernel, Rules
from benchmarks.resident_model import DEVICE, Cache, Model, forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

POSITIONS = 1024
UNEVEN = (850, 17, 1, 0, 300, 849, 63, 64)
SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=3)


class World:
    """A model with random weights and its builds, which share the packed weights."""

    def __init__(self, sizes: ModelSizes) -> None:
        torch.manual_seed(0)
        self.sizes = sizes
        self.model = Model.random(sizes, POSITIONS)
        self.kernels: dict[int, ResidentKernel] = {}

    def kernel(self, num_rows: int) -> ResidentKernel:
        tiles = next(tiles for tiles in RING_STAGES if num_rows <= 8 * tiles)
        if tiles not in self.kernels:
            weights = next(iter(self.kernels.values())).weights if self.kernels else None
            self.kernels[tiles] = ResidentKernel(self.model, tiles, weights=weights)
        return self.kernels[tiles]


class Rows:
    """Rows of a launch with a cache of their own."""

    def __init__(self, world: World, count: int, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.count, self.sizes = count, world.sizes
        shape = (count,)
        self.tokens = torch.randint(world.sizes.vocab_size, shape, device=DEVICE)
        positions = [UNEVEN[row % len(UNEVEN)] for row in range(count)]
        self.positions = torch.tensor(positions, device=DEVICE)
        self.cache = Cache.random(world.sizes, count, POSITIONS // 16)
        self.rules = Rules.greedy()

    def only(self, rows: slice) -> Rows:
        some = object.__new__(Rows)
        some.tokens, some.positions = self.tokens[rows], self.positions[rows]
        pages = self.cache.pages[rows].contiguous()
        some.cache = Cache(self.cache.keys, self.cache.values, pages)
        some.count, some.sizes, some.rules = len(some.tokens), self.sizes, self.rules
        return some

    def run(self, kernel: ResidentKernel, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [S, B] and logits [S, B, V]."""
        shape = (steps, 8 * kernel.tiles, self.sizes.vocab_size)
        logits = torch.full(shape, torch.nan, device=DEVICE)
        kernel.rules = self.rules
        kernel.run(self.cache, self.tokens, self.positions, steps, logits=logits)
        assert kernel.ended("test")
        return kernel.tokens(steps, self.count), logits[:, : self.count]


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 32])
def test_steps_are_the_models(world: World, num_rows: int) -> None:
    """Logits of every step are those of float32 within bf16's rounding, and its token is the
    highest of them.
    """
    rows, steps = Rows(world, num_rows), 4
    expected_cache = rows.cache.clone()
    tokens, logits = rows.run(world.kernel(num_rows), steps)
    fed = rows.tokens
    for step in range(steps):
        expected, _ = forward(world.model, expected_cache, fed, rows.positions + step)
        error = (logits[step].double() - expected).norm() / expected.double().norm()
        assert error < 2e-2
        assert torch.equal(tokens[step], logits[step].argmax(-1))
        fed = tokens[step]


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    """1 to 32 rows, as many as the engine launches, by three builds."""
    rows = Rows(world, 32)
    alone = [rows.only(slice(row, row + 1)).run(world.kernel(1), 1)[1][0, 0] for row in range(32)]
    for count in (*range(2, 10), 15, 16, 17, 22, 31, 32):
        _, logits = rows.only(slice(0, count)).run(world.kernel(count), 1)
        assert all(torch.equal(logits[0, row], alone[row]) for row in range(count)), count


@pytest.mark.parametrize(
    ("num_rows", "build", "repeats"),
    [(1, 8, 150), (8, 8, 150), (13, 16, 60), (1, 32, 400), (32, 32, 60)],
)
def test_repeats_have_the_same_bits(world: World, num_rows: int, build: int, repeats: int) -> None:
    """The counters go on from launch to launch, and no launch differs, whichever build it has."""
    rows, kernel = Rows(world, num_rows), world.kernel(build)
    first_tokens, first = rows.run(kernel, 3)
    for _ in range(repeats):
        tokens, logits = rows.run(kernel, 3)
        assert torch.equal(tokens, first_tokens)
        assert torch.equal(logits, first)


def test_late_warps_change_nothing() -> None:
    """Random sleeps around every wait and signal."""
    world = World(LEGATO_TINY)
    rows = Rows(world, 6)
    rows.rules.temperature_R[::2] = 0.8
    expected = rows.run(world.kernel(6), 12)
    late = ResidentKernel(world.model, 1, weights=world.kernel(6).weights, delays=True)
    for _ in range(60):
        assert all(map(torch.equal, rows.run(late, 12), expected))


RULES = list(itertools.product((0.3, 1.0, 2.5), (1.0, 0.9, 0.2), (0, 1, 50)))


def test_tokens_are_those_of_the_sampling_kernel(world: World) -> None:
    """Given equal logits: greedy rows and every mix of temperature, top-p and top-k."""
    sampler, num_rows, steps = Sampler(world.sizes.vocab_size), 28, 3
    for temperature, top_p, top_k in RULES:
        rows = Rows(world, num_rows)
        rows.rules.temperature_R[1:] = temperature
        rows.rules.top_p_R.fill_(top_p)
        rows.rules.top_k_R.fill_(top_k)
        rows.rules.seed_R.copy_(torch.arange(len(rows.rules.seed_R)) * 7919)
        tokens, logits = rows.run(world.kernel(num_rows), steps)
        free = torch.zeros(1, world.sizes.vocab_size, device=DEVICE)
        state = dataclasses.replace(rows.rules, token_R=torch.zeros_like(rows.rules.token_R))
        for step in range(steps):
            expected = torch.zeros_like(tokens[step])
            sampler.sample(
                state,
                logits[step].contiguous(),
                free,
                torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
                torch.arange(num_rows, device=DEVICE),
                rows.positions + 1 + step,
                expected,
            )
            assert torch.equal(tokens[step], expected), (temperature, top_p, top_k, step)


def test_a_row_that_is_not_finite_ends_the_launch() -> None:
    """Its token is -1, and the others have theirs."""
    world = World(LEGATO_TINY)
    rows, kernel = Rows(world, 4), world.kernel(4)
    rows.cache.values[:, rows.cache.pages[2, 0].long()] = torch.nan
    rows.positions.fill_(40)
    kernel.rules = rows.rules
    kernel.run(rows.cache, rows.tokens, rows.positions, 9)
    assert kernel.ended("test")
    tokens = kernel.tokens(1, 4)[0].tolist()
    assert [token < 0 for token in tokens] == [False, False, True, False]
    assert rows.rules.token_R[:4].tolist() == [max(token, 0) for token in tokens]


def test_a_stuck_wait_is_reported_and_ends_the_launch() -> None:
    """The steps before it are whole, and another build's launches go on."""
    world = World(LEGATO_TINY)
    rows, kernel = Rows(world, 2), world.kernel(2)
    stuck = ResidentKernel(world.model, 1, stuck_in_step(kernel.program, 3), kernel.weights)
    expected, _ = rows.run(kernel, 3)
    stuck.rules = rows.rules
    stuck.run(rows.cache, rows.tokens, rows.positions, 9, patience_ms=20)
    torch.cuda.synchronize()
    fault = stuck.build.fault()
    assert fault is not None
    assert "step 3" in fault
    assert torch.equal(stuck.tokens(3, 2), expected)
    assert torch.equal(rows.rules.token_R[:2], expected[-1])
    assert rows.run(kernel, 3)[0].equal(expected)


def stuck_in_step(program: Program, step: int) -> Program:
    """In that step of a first launch worker 7 waits for one head more than there are."""
    sizes, workers = program.sizes, list(program.workers)
    first, *rest = workers[7]
    wait = {"wait": counter(sizes, Kind.BEST), "wait_stride": sizes.num_workers + 1}
    workers[7] = (dataclasses.replace(first, wait_count=1 - step, **wait), *rest)
    return Program(sizes, program.ring_stages, tuple(workers))
