"""Properties of the megakernel's steps on any machine: a GPU, or a CPU that emulates one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from legato_engine.device.base import Device
from legato_engine.kernels.accelerated import Sampler
from legato_engine.kernels.cuda.module import Compile, Module
from legato_engine.kernels.megakernel.kernel import RING_STAGES, MegakernelWeights
from legato_engine.kernels.megakernel.program import CounterKind, Program, counter
from legato_engine.kernels.megakernel.sizes import HEAD_DIM, PAGE, ROTARY_DIM, ModelSizes
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.step import (
    DecoderSizes,
    StepCache,
    StepPositions,
    packed_head,
    step_decoder,
)

from benchmarks.megakernel.kernel import ResidentKernel, Rules
from benchmarks.megakernel.model import DEVICE, Cache, Model, forward

# ---------------------------------------------------------------- machines


@dataclasses.dataclass(frozen=True)
class Machine:
    """The tensors' device and the kernel's compiler; by default those of the current GPU."""

    device: torch.device = DEVICE
    compile_source: Compile = Module
    drafting_device: Device | None = None


GPU = Machine()


# ---------------------------------------------------------------- words
# Properties of the megakernel's steps, on any machine.
#
# Shape legend: S steps, B rows, V vocabulary.

POSITIONS = 1024
UNEVEN = (850, 17, 1, 0, 300, 849, 63, 64)


class World:
    """A model with random weights and its builds, which share the packed weights."""

    def __init__(self, sizes: ModelSizes, machine: Machine = GPU) -> None:
        torch.manual_seed(0)
        self.sizes, self.machine, self.device = sizes, machine, machine.device
        self.model = Model.random(sizes, POSITIONS, self.device)
        self.kernels: dict[int, ResidentKernel] = {}
        self.weights: MegakernelWeights | None = None

    def kernel(self, num_rows: int) -> ResidentKernel:
        tiles = next(tiles for tiles in RING_STAGES if num_rows <= 8 * tiles)
        if tiles not in self.kernels:
            self.kernels[tiles] = self.build(tiles)
        return self.kernels[tiles]

    def build(
        self, tiles: int, program: Program | None = None, *, delays: bool = False
    ) -> ResidentKernel:
        """Build a separate kernel, of another program than the model's if given."""
        compile_source = self.machine.compile_source
        made = ResidentKernel(
            self.model, tiles, program, self.weights, delays=delays, compile_source=compile_source
        )
        self.weights = made.weights
        return made


class Rows:
    """Rows of a launch with a cache of their own."""

    def __init__(self, world: World, count: int, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.count, self.sizes, self.device = count, world.sizes, world.device
        self.tokens = torch.randint(world.sizes.vocab_size, (count,), device=self.device)
        positions = [UNEVEN[row % len(UNEVEN)] for row in range(count)]
        self.positions = torch.tensor(positions, device=self.device)
        self.cache = Cache.random(world.sizes, count, POSITIONS // 16, self.device)
        self.rules = Rules.greedy(self.device)

    def only(self, rows: slice) -> Rows:
        some = object.__new__(Rows)
        some.tokens, some.positions = self.tokens[rows], self.positions[rows]
        pages = self.cache.pages[rows].contiguous()
        some.cache = Cache(self.cache.keys, self.cache.values, pages)
        some.count, some.sizes, some.rules = len(some.tokens), self.sizes, self.rules
        some.device = self.device
        return some

    def run(self, kernel: ResidentKernel, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [S, B] and logits [S, B, V]."""
        shape = (steps, 8 * kernel.tiles, self.sizes.vocab_size)
        logits = torch.full(shape, torch.nan, device=self.device)
        kernel.rules = self.rules
        kernel.run(self.cache, self.tokens, self.positions, steps, logits=logits)
        assert kernel.ended("test")
        return kernel.tokens(steps, self.count), logits[:, : self.count]


def steps_are_the_models(world: World, num_rows: int, steps: int = 4) -> None:
    """Every step's logits are those of float32 within bf16's rounding, its token the highest."""
    rows = Rows(world, num_rows)
    expected_cache = rows.cache.clone()
    tokens, logits = rows.run(world.kernel(num_rows), steps)
    fed = rows.tokens
    for step in range(steps):
        expected, _ = forward(world.model, expected_cache, fed, rows.positions + step)
        error = (logits[step].double() - expected).norm() / expected.double().norm()
        assert error < 2e-2
        assert torch.equal(tokens[step], logits[step].argmax(-1))
        fed = tokens[step]


def a_row_has_the_same_bits_in_every_batch(world: World, counts: Iterable[int]) -> None:
    """Whatever other rows there are, and whichever build they have."""
    most = max(counts)
    rows = Rows(world, most)
    alone = [rows.only(slice(row, row + 1)).run(world.kernel(1), 1)[1][0, 0] for row in range(most)]
    for count in counts:
        _, logits = rows.only(slice(0, count)).run(world.kernel(count), 1)
        assert all(torch.equal(logits[0, row], alone[row]) for row in range(count)), count


SHARING = ((3, 9), (1, 9), (1, 0), (9, 3), (2, 1))
"""Neighbours and how many leading pages they have in common; the first four rows have the same."""


def rows_that_share_pages_have_their_own_bits(
    world: World, steps: int, sharing: Iterable[tuple[int, int]] = SHARING
) -> None:
    """Compare each row with its own run, also beside a row whose own pages have no numbers."""
    sharing = tuple(sharing)
    rows = Rows(world, sum(count for count, _ in sharing))
    first, pages = 0, rows.cache.pages
    for index, (count, common) in enumerate(sharing):
        some = slice(first, first + count)
        pages[some, :common] = pages[0 if index == 1 else first, :common].clone()
        rows.positions[some] = common * 16 + torch.arange(count, device=world.device) * 37 % 300
        first += count
    one = [rows.only(slice(row, row + 1)) for row in range(rows.count)]
    alone = [each.run(world.kernel(1), steps) for each in one]
    for broken in (None, 2):
        if broken is not None:
            rows.positions[broken] += 32
            rows.cache.values[:, pages[broken, int(rows.positions[broken]) // 16 - 1].long()] = (
                torch.nan
            )
        most = steps if broken is None else 1
        tokens, logits = rows.run(world.kernel(rows.count), most)
        for row in range(rows.count):
            if row != broken:
                assert torch.equal(tokens[:, row], alone[row][0][:most, 0]), row
                assert torch.equal(logits[:, row], alone[row][1][:most, 0]), row


def repeats_have_the_same_bits(
    world: World, num_rows: int, build: int, repeats: int, steps: int = 3
) -> None:
    """The counters go on from launch to launch, and no launch differs, whichever build it has."""
    rows, kernel = Rows(world, num_rows), world.kernel(build)
    first_tokens, first = rows.run(kernel, steps)
    for _ in range(repeats):
        tokens, logits = rows.run(kernel, steps)
        assert torch.equal(tokens, first_tokens)
        assert torch.equal(logits, first)


def late_warps_change_nothing(world: World, repeats: int, steps: int = 12) -> None:
    """Random sleeps around every wait and signal."""
    rows = Rows(world, 6)
    rows.rules.temperature_R[::2] = 0.8
    expected = rows.run(world.kernel(6), steps)
    late = world.build(1, delays=True)
    for _ in range(repeats):
        assert all(map(torch.equal, rows.run(late, steps), expected))


RULES = tuple(itertools.product((0.3, 1.0, 2.5), (1.0, 0.9, 0.2), (0, 1, 50)))
"""Temperature, top-p and top-k."""


def tokens_are_those_of_the_sampling_kernel(
    world: World,
    num_rows: int,
    steps: int,
    rules: Iterable[tuple[float, float, int]] = RULES,
    shift: float = 0.0,
) -> None:
    """Given equal logits, greedy rows and others side by side sample the same tokens.

    With a large `shift` of all scores many of them are equal.
    """
    sampler, device = Sampler(world.sizes.vocab_size), world.device
    free = torch.full((1, world.sizes.vocab_size), shift, device=device)
    for temperature, top_p, top_k in rules:
        rows = Rows(world, num_rows)
        rows.rules.temperature_R[1:] = temperature
        rows.rules.top_p_R.fill_(top_p)
        rows.rules.top_k_R.fill_(top_k)
        rows.rules.seed_R.copy_(torch.arange(len(rows.rules.seed_R)) * 7919)
        kernel = world.kernel(num_rows)
        kernel.constraints_CV.copy_(free)
        tokens, logits = rows.run(kernel, steps)
        kernel.constraints_CV.zero_()
        state = dataclasses.replace(rows.rules, token_R=torch.zeros_like(rows.rules.token_R))
        for step in range(steps):
            expected = torch.zeros_like(tokens[step])
            sampler.sample(
                state,
                logits[step].contiguous(),
                free,
                torch.zeros(num_rows, dtype=torch.int64, device=device),
                torch.arange(num_rows, device=device),
                rows.positions + 1 + step,
                expected,
            )
            assert torch.equal(tokens[step], expected), (temperature, top_p, top_k, step)


def a_row_that_is_not_finite_ends_the_launch(world: World) -> None:
    """Its token is -1, and the others have theirs."""
    rows, kernel = Rows(world, 4), world.kernel(4)
    rows.cache.values[:, rows.cache.pages[2, 0].long()] = torch.nan
    rows.positions.fill_(40)
    kernel.rules = rows.rules
    kernel.run(rows.cache, rows.tokens, rows.positions, 9)
    assert kernel.ended("test")
    tokens = kernel.tokens(1, 4)[0].tolist()
    assert [token < 0 for token in tokens] == [False, False, True, False]
    assert rows.rules.token_R[:4].tolist() == [max(token, 0) for token in tokens]


def a_stuck_wait_is_reported_and_ends_the_launch(world: World) -> None:
    """The steps before it are whole, and another build's launches go on."""
    rows, kernel = Rows(world, 2), world.kernel(2)
    stuck = world.build(1, stuck_in_step(kernel.program, 3))
    expected, _ = rows.run(kernel, 3)
    stuck.rules = rows.rules
    stuck.run(rows.cache, rows.tokens, rows.positions, 9, patience_ms=20)
    fault = stuck.fault()
    assert fault is not None
    assert "step 3" in fault
    assert torch.equal(stuck.tokens(3, 2), expected)
    assert torch.equal(rows.rules.token_R[:2], expected[-1])
    assert rows.run(kernel, 3)[0].equal(expected)


def stuck_in_step(program: Program, step: int) -> Program:
    """Let worker 7 wait for one head too many in that step of a first launch."""
    sizes, workers = program.sizes, list(program.workers)
    first, *rest = workers[7]
    wait = {"wait": counter(sizes, CounterKind.BEST), "wait_stride": sizes.num_workers + 1}
    workers[7] = (dataclasses.replace(first, wait_count=1 - step, **wait), *rest)
    return Program(sizes, program.ring_stages, tuple(workers))


# ---------------------------------------------------------------- captured steps


class CapturedSteps:
    """A model's steps by those kernels, on a copy of a cache."""

    def __init__(self, model: Model, cache: Cache) -> None:
        sizes = model.sizes
        decoder = DecoderSizes(
            dim=sizes.dim,
            ff_dim=sizes.ff_dim,
            num_heads=sizes.dim // HEAD_DIM,
            rotary_dim=ROTARY_DIM,
            vocab_size=sizes.vocab_size,
            page_size=PAGE,
            max_pages=cache.pages.shape[1],
        )
        layers = [layer.parameters for layer in model.layers]
        self._model, self.cache = model, cache.clone()
        kept = StepCache(self.cache.keys, self.cache.values, None, model.cosines, model.sines)
        head, norm = model.head.affine, Affine(*model.norm)
        self._step = step_decoder(decoder, layers, packed_head([head], norm), kept)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, V] of one token of each row."""
        return self.step(self._model.embedding[tokens.long()].clone(), positions)

    def step(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [B, V] of the embedding [B, D] of one token of each row.

        The embedding becomes the last residual stream.
        """
        count = len(x)
        rows = torch.arange(count, device=x.device)
        table = self.cache.pages.long()
        self._step.layers(x, StepPositions(rows, positions.long(), positions.long(), table, count))
        logits = torch.empty(count, self._model.sizes.vocab_size, device=x.device)
        self._step.head(x, logits)
        return logits


def bits_are_those_of_captured_steps(world: World, num_rows: int, steps: int = 4) -> None:
    """Logits of every step, and all keys and values."""
    rows = Rows(world, num_rows)
    captured = CapturedSteps(world.model, rows.cache)
    tokens, logits = rows.run(world.kernel(num_rows), steps)
    fed = rows.tokens
    for step in range(steps):
        expected = captured.logits(fed, rows.positions + step)
        assert torch.equal(logits[step], expected), f"step {step}"
        fed = tokens[step]
    assert torch.equal(captured.cache.keys, rows.cache.keys)
    assert torch.equal(captured.cache.values, rows.cache.values)
