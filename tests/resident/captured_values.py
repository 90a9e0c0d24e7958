"""The kernels of captured steps on the same values, whose bits those of the megakernel are.

Shape legend: B rows, D width, F inner width, N bins of a scalar, S bins of a pair.
"""

from __future__ import annotations

import torch
from legato_engine.kernels.accelerated import SampledTokens
from legato_engine.kernels.cuda.value_heads import Embedder, MlpBins, TokenInputs, ValueReader
from legato_engine.kernels.megakernel.kernel import rows_of

from benchmarks.megakernel.kernel import ResidentKernel, Rules
from benchmarks.megakernel.values import PAIR, SCALAR
from tests.resident.captured import CapturedSteps
from tests.resident.values import Rows, Told, World

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
