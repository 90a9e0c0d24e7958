"""Properties of values inside the megakernel, on any machine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import torch
from legato_engine.kernels.accelerated import SampledTokens
from legato_engine.kernels.cuda.value_heads import Embedder, MlpBins, TokenInputs, ValueReader
from legato_engine.kernels.megakernel.kernel import RING_STAGES, rows_of
from legato_engine.kernels.megakernel.sizes import ModelSizes

from benchmarks.megakernel.kernel import ResidentKernel, Rules
from benchmarks.megakernel.model import END, PAIR, SCALAR, Cache, Model, RandomValues, forward
from tests.megakernel.words import GPU, CapturedSteps, Machine

POSITIONS = 512
PLACES = (333, 17, 1, 0, 300, 63, 64, 15)


class World:
    """A model whose tokens are mostly words and values in equal parts, with builds for both."""

    def __init__(self, sizes: ModelSizes, machine: Machine = GPU, inner_dim: int = 0) -> None:
        """`inner_dim` as `RandomValues.random` has it."""
        torch.manual_seed(0)
        self.sizes, self.machine, self.device = sizes, machine, machine.device
        self.model = Model.random(sizes, POSITIONS, self.device)
        for token in (SCALAR, PAIR):
            self.model.head.weight[token] *= 4  # far above or below the others
        self.values = RandomValues.random(sizes, self.device, inner_dim)
        self.two_layers = self.values.two_layers()
        self._kernels: dict[tuple[int, bool], ResidentKernel] = {}

    def kernel(self, num_rows: int, *, values: bool = True, delays: bool = False) -> ResidentKernel:
        tiles = next(tiles for tiles in RING_STAGES if num_rows <= 8 * tiles)
        if delays:
            return self._build(tiles, values=values, delays=True)
        if (tiles, values) not in self._kernels:
            self._kernels[tiles, values] = self._build(tiles, values=values, delays=False)
        return self._kernels[tiles, values]

    def _build(self, tiles: int, *, values: bool, delays: bool) -> ResidentKernel:
        return ResidentKernel(
            self.model,
            tiles,
            weights=next(iter(self._kernels.values())).weights if self._kernels else None,
            values=self.two_layers if values else None,
            delays=delays,
            compile_source=self.machine.compile_source,
        )


@dataclasses.dataclass
class Told:
    """Results of S steps: tokens, values and certainties of the ring, logits.

    With each step's last residual stream.
    """

    tokens: torch.Tensor
    payload: torch.Tensor
    certainty: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor

    def same(self, other: Told) -> bool:
        names = [field.name for field in dataclasses.fields(self)]
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)

    def row(self, index: int) -> Told:
        names = [field.name for field in dataclasses.fields(self)]
        return Told(**{name: getattr(self, name)[:, index : index + 1] for name in names})


class Rows:
    """Rows that begin with words and values in turn, with a cache of their own."""

    temperature = 0.7  # of every fourth row; the others are greedy

    def __init__(self, world: World, count: int) -> None:
        torch.manual_seed(count)
        self.sizes, self.device = world.sizes, world.device
        self.tokens = torch.randint(7, world.sizes.vocab_size, (count,), device=self.device)
        self.tokens[1::3], self.tokens[2::3] = SCALAR, PAIR
        self.payload = torch.rand(count, 2, device=self.device)
        places = [PLACES[row % len(PLACES)] for row in range(count)]
        self.positions = torch.tensor(places, device=self.device)
        self.cache = Cache.random(world.sizes, count, POSITIONS // 16, self.device)

    def some(self, of: slice) -> Rows:
        some = copy.copy(self)
        some.tokens, some.payload = self.tokens[of], self.payload[of]
        some.positions = self.positions[of]
        pages = self.cache.pages[of].contiguous()
        some.cache = Cache(self.cache.keys, self.cache.values, pages)
        return some

    def run(self, kernel: ResidentKernel, steps: int) -> Told:
        count = len(self.tokens)
        shape = (steps, 8 * kernel.tiles, self.sizes.vocab_size)
        logits = torch.full(shape, torch.nan, device=self.device)
        each = (steps, self.sizes.num_layers, 8 * kernel.tiles, self.sizes.dim)
        trace = torch.full(each, torch.nan, device=self.device, dtype=torch.bfloat16)
        kernel.rules = Rules.greedy(self.device)
        kernel.rules.temperature_R[1::4] = self.temperature
        kernel.rules.seed_R.copy_(torch.arange(len(kernel.rules.seed_R)))
        kernel.run(
            self.cache,
            self.tokens,
            self.positions,
            steps,
            payload=self.payload,
            logits=logits,
            trace=trace,
        )
        assert kernel.ended("test")
        told = kernel.tokens(steps, count), *kernel.values(steps, count)
        return Told(*told, logits[:, :count], trace[:, -1, :count].clone())


def values_are_fed_back_as_the_model_does(world: World, num_rows: int, steps: int = 5) -> None:
    """Every step's logits are those of float32 within bf16's rounding.

    They follow tokens whose values the kernel has read itself.
    """
    rows = Rows(world, num_rows)
    cache = rows.cache.clone()
    told = rows.run(world.kernel(num_rows), steps)
    token, payload = rows.tokens, rows.payload
    for step in range(steps):
        x = world.values.embed(world.model.embedding, token, payload)
        expected, _ = forward(world.model, cache, token, rows.positions + step, x)
        error = (told.logits[step].double() - expected).norm() / expected.double().norm()
        assert error < 2e-2
        token, payload = told.tokens[step], told.payload[step]
    if num_rows > 8:
        kinds = [(told.tokens == token).sum() for token in (SCALAR, PAIR)]
        assert min(kinds) > 0
        assert sum(kinds) < told.tokens.numel()


def bins_are_those_of_the_decoders(world: World, num_rows: int) -> None:
    """As float32 has them, within bf16's rounding; existence is that of the token's logits."""
    rows, kernel = Rows(world, num_rows), world.kernel(num_rows)
    for steps in (1, 2):
        told = rows.run(kernel, steps)
        last = steps - 1
        token, hidden = told.tokens[last], told.hidden[last].float()
        bins = kernel.build.values.bins[:num_rows]
        split = world.values.sizes.scalar_bins
        for kind, own in (
            (world.values.scalar, bins[:, :split]),
            (world.values.pair, bins[:, split:]),
        ):
            if bool((token == kind.token).any()):
                expected = kind.bins(hidden)
                assert (own - expected).norm() / expected.norm() < 1e-2
        plain = (token != SCALAR) & (token != PAIR)
        assert bool((told.certainty[last][plain] == 1).all())
        if bool((~plain).any()):
            gap = told.logits[last].gather(1, token[:, None])[:, 0] - told.logits[last][:, END]
            exists = torch.sigmoid(gap.double()).float()[~plain]
            assert torch.allclose(told.certainty[last][~plain, 0], exists, rtol=1e-5)


def a_row_has_the_same_bits_in_every_batch(
    world: World, counts: Iterable[int], steps: int = 3
) -> None:
    """Greedy rows over several steps, whatever other rows there are."""
    most = max(counts)
    rows = Rows(world, most)
    rows.temperature = 0.0
    alone = [rows.some(slice(row, row + 1)).run(world.kernel(1), steps) for row in range(most)]
    for count in counts:
        told = rows.some(slice(0, count)).run(world.kernel(count), steps)
        assert all(told.row(row).same(alone[row]) for row in range(count)), count


def words_have_the_same_bits_by_both_builds(world: World, counts: Iterable[int]) -> None:
    for count in counts:
        rows = Rows(world, count)
        rows.tokens.clamp_(min=7)
        plain, valued = (
            rows.run(world.kernel(count, values=values), 1) for values in (False, True)
        )
        for name in ("tokens", "logits", "hidden"):
            assert torch.equal(getattr(plain, name), getattr(valued, name)), (count, name)


def repeats_have_the_same_bits(world: World, num_rows: int, repeats: int, steps: int = 4) -> None:
    rows, kernel = Rows(world, num_rows), world.kernel(num_rows)
    first = rows.run(kernel, steps)
    for _ in range(repeats):
        assert rows.run(kernel, steps).same(first)


def late_warps_change_nothing(world: World, repeats: int, steps: int = 12) -> None:
    """Random sleeps around every wait and signal."""
    rows = Rows(world, 6)
    expected = rows.run(world.kernel(6), steps)
    late = world.kernel(6, delays=True)
    for _ in range(repeats):
        assert rows.run(late, steps).same(expected)


# ---------------------------------------------------------------- captured values
# The kernels of captured steps on the same values, whose bits those of the megakernel are.
#
# Shape legend: B rows, D width, F inner width, N bins of a scalar, S bins of a pair.

MARGIN = 0.5
"""By which the first row's favoured token has the highest logit."""


class CapturedValues:
    """Captured kernels of values, on the same tokens, values and hidden rows."""

    def __init__(self, world: World) -> None:
        values, self._device = world.two_layers, world.device
        (scalar_encoder, scalar), (pair_encoder, pair) = values.scalar, values.pair
        self._words_VD, self._dim = world.model.embedding, values.sizes.dim
        self._embedder = Embedder(values.sizes, scalar_encoder, pair_encoder)
        self._bins = MlpBins(values.sizes, scalar, pair, self._device)
        self._reader = ValueReader(values.sizes)

    def embed(self, token_B: torch.Tensor, payload_B2: torch.Tensor) -> torch.Tensor:
        """[B, D] of rows of the state."""
        token_B, payload_B2 = token_B.long(), payload_B2.contiguous()
        x_BD = torch.full((len(token_B), self._dim), torch.nan, device=self._device).bfloat16()
        rows = torch.arange(len(token_B), device=self._device)
        inputs = TokenInputs(rows, token_B, payload_B2, token_B, payload_B2)
        self._embedder.embed(inputs, self._words_VD, x_BD)
        return x_BD

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inner activations [B, 2F], bins [B, N] and [B, S]; NaN of decoders that do not run."""
        bins, count = self._bins, len(token_B)
        for each in (bins._inner_BF, bins.scalar_bins_BN, bins.pair_bins_BS):
            each.fill_(torch.nan)
        bins.fill(token_B.long(), hidden_BD)
        return bins._inner_BF[:count], bins.scalar_bins_BN[:count], bins.pair_bins_BS[:count]

    def read(
        self, told: Told, step: int, constraints_CV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and certainties [B, 2] of a step's tokens, of the bins that `bins` has left."""
        token_B, count = told.tokens[step], len(told.tokens[step])
        nan_B2 = torch.full((count, 2), torch.nan, device=self._device)
        sampled = SampledTokens(
            row_B=torch.arange(count, device=self._device),
            token_B=token_B,
            hidden_BD=told.hidden[step],
            logits_BV=told.logits[step].contiguous(),
            constraints_CV=constraints_CV,
            constraint_S=torch.zeros(count, dtype=torch.int64, device=self._device),
            entry_B=None,
            payload_B2=nan_B2.clone(),
            certainty_B2=nan_B2.clone(),
        )
        state = Rules.greedy(self._device)
        state.token_R[:count] = token_B
        bins = self._bins
        scalar_BN, pair_BS = bins.scalar_bins_BN[:count], bins.pair_bins_BS[:count]
        self._reader.read(state, scalar_BN, pair_BS, sampled, overlap=False)
        assert torch.equal(state.payload_R2[:count], sampled.payload_B2)
        return sampled.payload_B2, sampled.certainty_B2


def bits_are_those_of_captured_steps(world: World, num_rows: int) -> None:
    """Given the same tokens, values and hidden rows, captured steps have the same bits.

    Compared are embeddings, inner activations, bins, values and certainties, of one step and of
    two, with a constraint that lets the first row's token be a word, a scalar or a pair.
    """
    assert world.sizes.num_layers == 1, "the embedding is kept until the step's end"
    rows, kernel = Rows(world, num_rows), world.kernel(num_rows)
    captured = CapturedValues(world)
    logits_V = rows.run(kernel, 1).logits[0, 0]
    for favourite in (int(rows.tokens[0]), SCALAR, PAIR):
        kernel.favour(favourite, float(logits_V.max() - logits_V[favourite]) + MARGIN)
        for steps in (1, 2):
            told, last = rows.run(kernel, steps), steps - 1
            assert told.tokens[0, 0] == favourite
            _embeddings_are_equal(rows, told, last, captured, rows_of(kernel.build.x[0]))
            _values_are_equal(kernel, told, last, captured)
    kernel.favour(SCALAR, 0.0)


def steps_are_captured_ones(world: World, num_rows: int, steps: int = 4) -> None:
    """Every step has the logits, hidden rows, values and keys of captured steps.

    Values that the kernel has read are fed back as captured steps feed back theirs.
    """
    rows, values = Rows(world, num_rows), CapturedValues(world)
    captured, kernel = CapturedSteps(world.model, rows.cache), world.kernel(num_rows)
    told = rows.run(kernel, steps)
    token_B, payload_B2 = rows.tokens, rows.payload
    for step in range(steps):
        x_BD = values.embed(token_B, payload_B2)
        logits_BV = captured.step(x_BD, rows.positions + step)
        assert torch.equal(told.hidden[step], x_BD), step
        assert torch.equal(told.logits[step], logits_BV), step
        token_B = told.tokens[step]
        values.bins(token_B, x_BD)
        payload_B2, certainty_B2 = values.read(told, step, kernel.constraints_CV)
        assert torch.equal(told.payload[step], payload_B2), step
        assert torch.equal(told.certainty[step], certainty_B2), step
    assert torch.equal(captured.cache.keys, rows.cache.keys)
    assert torch.equal(captured.cache.values, rows.cache.values)
    if num_rows > 8:
        assert {SCALAR, PAIR} < set(told.tokens.flatten().tolist())


def _embeddings_are_equal(
    rows: Rows, told: Told, step: int, captured: CapturedValues, x_BD: torch.Tensor
) -> None:
    """Compare the embeddings of the step's input tokens: words, scalars and pairs."""
    count = len(rows.tokens)
    before = (
        (told.tokens[step - 1], told.payload[step - 1]) if step else (rows.tokens, rows.payload)
    )
    assert torch.equal(x_BD[:count], captured.embed(*before))


def _values_are_equal(
    kernel: ResidentKernel, told: Told, step: int, captured: CapturedValues
) -> None:
    token_B, count = told.tokens[step], len(told.tokens[step])
    inner_BF, scalar_BN, pair_BS = captured.bins(token_B, told.hidden[step])
    own, split = kernel.build.values, scalar_BN.shape[1]
    own_inner_BF = rows_of(own.inner)[:count]
    width = inner_BF.shape[1] // 2
    for token, half, bins, expected in (
        (SCALAR, slice(0, width), own.bins[:count, :split], scalar_BN),
        (PAIR, slice(width, None), own.bins[:count, split:], pair_BS),
    ):
        if bool((token_B == token).any()):
            assert torch.equal(own_inner_BF[:, half], inner_BF[:, half])
            assert torch.equal(bins, expected)
    payload_B2, certainty_B2 = captured.read(told, step, kernel.constraints_CV)
    assert torch.equal(told.payload[step], payload_B2)
    assert torch.equal(told.certainty[step], certainty_B2)
