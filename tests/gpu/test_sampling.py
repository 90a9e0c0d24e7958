"""On a GPU: the sampling and payload kernels choose what the definition chooses.

Shape legend: B rows of a batch, R rows of the state, V vocabulary, C constraints, N bins.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from legato_engine.kernels.cuda.sampling import SampledTokens, Sampler
from legato_engine.kernels.cuda.value_heads import ValueReader, ValueSizes
from legato_engine.kernels.reference import concentration, existence
from legato_engine.runtime.decode_slot import RowState
from legato_engine.runtime.sampler import constraint_table, greedy
from legato_engine.sequence import Constraint

from tests.engine.kernels.test_sampling_spec import (
    KINDS,
    LIMITS,
    Draw,
    Floats,
    acceptable,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
VOCABS = (1536, 51200)
BATCHES = (1, 8, 32)
ROWS = 40
COORD, SIZE = 5, 6


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the decode step has it, all on the GPU."""

    state: RowState
    logits_BV: torch.Tensor
    constraints_CV: torch.Tensor
    constraint_B: torch.Tensor
    row_B: torch.Tensor
    position_B: torch.Tensor
    tokens_B: torch.Tensor

    def launch(self, sampler: Sampler) -> None:
        """One launch of the kernel over this batch."""
        sampler.sample(
            self.state,
            self.logits_BV,
            self.constraints_CV,
            self.constraint_B,
            self.row_B,
            self.position_B,
            self.tokens_B,
        )

    def constrained(self) -> Floats:
        """[B, V] float32 logits as the choice sees them, on the host."""
        constrained_BV = self.logits_BV + self.constraints_CV[self.constraint_B]
        logits_BV: Floats = constrained_BV.cpu().numpy()
        return logits_BV


def finite_values(kind: str, vocab: int, seed: int) -> torch.Tensor:
    """[V] logits of that kind, where a masked one is only very low."""
    return torch.from_numpy(values(kind, vocab, seed)).clamp(min=-3e4)


def make_batch(
    vocab: int, draws: list[Draw], kinds: list[str], device: torch.device = DEVICE
) -> Batch:
    """Row i draws as `draws[i]` from logits of `kinds[i]`; rows are in falling order."""
    state = RowState(ROWS, 1, device)
    row_B = ROWS - 1 - torch.arange(len(draws), device=device)
    for row, draw in zip(row_B.tolist(), draws, strict=True):
        state.temperature_R[row] = draw.temperature
        state.top_p_R[row] = draw.top_p
        state.top_k_R[row] = draw.top_k
        state.seed_R[row] = draw.seed
    logits = [finite_values(kind, vocab, seed) for seed, kind in enumerate(kinds)]
    even = tuple(range(0, vocab, 2))
    limits = [Constraint(), Constraint((3, vocab // 2, vocab - 1)), Constraint(None, even)]
    return Batch(
        state=state,
        logits_BV=torch.stack(logits).to(device),
        constraints_CV=constraint_table(limits, vocab).to(device),
        constraint_B=torch.arange(len(draws), device=device) % len(limits),
        row_B=row_B,
        position_B=torch.tensor([draw.position for draw in draws], device=device),
        tokens_B=torch.full((len(draws),), -7, device=device),
    )


def mixed_draws(batch: int, offset: int) -> list[Draw]:
    """Greedy and sampled rows side by side, over all limits as the offset goes on."""
    return [
        Draw(
            temperature=(0.0, 0.3, 1.0, 1.7)[(n + offset) % 4],
            top_p=LIMITS[(n + offset) % len(LIMITS)][0],
            top_k=LIMITS[(n + offset) % len(LIMITS)][1],
            seed=2**63 - 5 - n,
            position=n + offset,
        )
        for n in range(batch)
    ]


def tokens_are_those_of_the_definition(
    vocab: int, batch: int, offsets: range, device: torch.device = DEVICE
) -> None:
    """Every row chooses what float64 does, up to scores and shares within rounding."""
    sampler = Sampler(vocab)
    certain, rows = 0, 0
    for offset in offsets:
        draws = mixed_draws(batch, offset)
        kinds = [KINDS[(n + offset // 2) % len(KINDS)] for n in range(batch)]
        run = make_batch(vocab, draws, kinds, device)
        run.launch(sampler)
        assert torch.equal(run.state.token_R[run.row_B], run.tokens_B)
        for n, logits_V in enumerate(run.constrained()):
            tokens = acceptable(logits_V, draws[n])
            assert int(run.tokens_B[n]) in tokens, (draws[n], kinds[n])
            certain, rows = certain + (len(tokens) == 1), rows + 1
    assert certain > 0.8 * rows


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_are_those_of_the_definition(vocab: int, batch: int) -> None:
    tokens_are_those_of_the_definition(vocab, batch, range(0, len(LIMITS), max(batch, 5)))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_rows_are_the_reference(vocab: int, batch: int) -> None:
    """A greedy row takes the highest constrained logit, ties to the lowest id."""
    kinds = [KINDS[n % len(KINDS)] for n in range(batch)]
    run = make_batch(vocab, [Draw(temperature=0.0)] * batch, kinds)
    run.launch(Sampler(vocab))
    expected_B = greedy(run.logits_BV + run.constraints_CV[run.constraint_B])
    # A GPU's argmax does not promise the lowest id among equals; numpy's does.
    lowest_B = torch.from_numpy(run.constrained().argmax(-1)).cuda()
    assert torch.equal(run.tokens_B, lowest_B)
    rows = torch.arange(batch, device="cuda")
    constrained_BV = run.logits_BV + run.constraints_CV[run.constraint_B]
    assert torch.equal(constrained_BV[rows, expected_B], constrained_BV[rows, run.tokens_B])


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite(vocab: int, temperature: float, broken: float) -> None:
    """Such a row reports -1 and feeds token 0, wherever it is broken, and its neighbours go on."""
    at = (0, 1, vocab // 2, vocab - 1)
    draws = [Draw(temperature=temperature, top_p=0.9)] * 5
    run = make_batch(vocab, draws, ["spread"] * 5)
    for row, token in enumerate(at):
        run.logits_BV[row, token] = broken
    run.launch(Sampler(vocab))
    assert run.tokens_B[:4].tolist() == [-1] * 4
    assert run.state.token_R[run.row_B[:4]].tolist() == [0] * 4
    assert int(run.tokens_B[4]) in acceptable(run.constrained()[4], draws[4])


@pytest.mark.parametrize("vocab", VOCABS)
def test_padding_and_neighbours_change_no_token(vocab: int) -> None:
    """A row's token is the same alone, in a batch, beside padding, and again."""
    draws = [Draw(1.0, 0.9, 0, n, n) for n in range(8)]
    sampler = Sampler(vocab)
    run = make_batch(vocab, draws, ["spread"] * 8)
    run.launch(sampler)
    expected_B = run.tokens_B.clone()
    for _ in range(20):
        run.tokens_B.fill_(-7)
        run.launch(sampler)
        assert torch.equal(run.tokens_B, expected_B)
    run.row_B[5:] = run.state.scratch_row
    run.launch(sampler)
    assert torch.equal(run.tokens_B[:5], expected_B[:5])
    assert run.tokens_B[5:].tolist() == [0] * 3


def test_a_captured_launch_reads_its_buffers_again() -> None:
    """A replay chooses from the logits of that moment."""
    sampler = Sampler(1536)
    run = make_batch(1536, mixed_draws(8, 0), ["spread"] * 8)
    run.launch(sampler)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.launch(sampler)
    run.logits_BV.copy_(run.logits_BV.roll(1, 0))
    graph.replay()
    replayed_B = run.tokens_B.clone()
    run.launch(sampler)
    assert torch.equal(run.tokens_B, replayed_B)


def test_payloads_are_those_of_the_bins() -> None:
    """A coord token gets (bin / bins, 0), a size token its two sizes, any other token zeros."""
    generator = torch.Generator().manual_seed(1)
    coord_BN = torch.randn(9, 1024, generator=generator).round(decimals=1).cuda()
    size_BN = torch.randn(9, 2048, generator=generator).round(decimals=1).cuda()
    state = RowState(ROWS, 1, torch.device("cuda"))
    row_B = torch.arange(9, device="cuda") + 3
    token_B = torch.tensor([COORD, SIZE, 0] * 3, device="cuda")
    state.token_R[row_B] = token_B
    state.payload_R2.fill_(7.0)
    payload_B2 = torch.full((9, 2), 7.0, device="cuda")
    sizes = ValueSizes(
        dim=64,
        inner_dim=None,
        scalar_features=4,
        pair_features=4,
        scalar_bins=1024,
        pair_bins=2048,
        scalar_divisor=1024,
        scalar_token=COORD,
        pair_token=SIZE,
        end_token=0,
        scalar_reach=32,
        pair_reach=51,
        vocab=64,
    )
    logits_BV = torch.randn(9, 64, generator=generator).cuda()
    constraints_CV = constraint_table([Constraint(), Constraint((COORD, SIZE))], 64).cuda()
    constraint_B = torch.arange(9, device="cuda") % 2
    sampled = SampledTokens(
        row_B=row_B,
        token_B=token_B,
        hidden_BD=coord_BN,
        logits_BV=logits_BV,
        constraints_CV=constraints_CV,
        constraint_S=constraint_B,
        entry_B=None,
        payload_B2=payload_B2,
        certainty_B2=torch.full((9, 2), 7.0, device="cuda"),
    )
    reader = ValueReader(sizes)
    reader.read(state, coord_BN, size_BN, sampled)
    chained = dataclasses.replace(
        sampled,
        constraint_S=constraint_B.flip(0),
        entry_B=torch.arange(8, -1, -1, device="cuda"),
        certainty_B2=torch.full((9, 2), 7.0, device="cuda"),
    )
    reader.read(state, coord_BN, size_BN, chained, overlap=False)
    assert torch.equal(chained.certainty_B2, sampled.certainty_B2)
    pair_BN = size_BN.reshape(9, 2, 1024)
    near_pair_B2 = concentration(pair_BN, pair_BN.argmax(-1), 51)
    near_B = concentration(coord_BN, coord_BN.argmax(-1), 32)
    near_B[1::3] = near_pair_B2[1::3].prod(-1)
    exists_B = existence(logits_BV + constraints_CV[constraint_B], token_B, 0)
    certainty_B2 = torch.stack([exists_B, near_B], dim=-1)
    certainty_B2[2::3] = 1.0
    torch.testing.assert_close(sampled.certainty_B2, certainty_B2, rtol=2e-6, atol=1e-7)
    coord_B = torch.from_numpy(coord_BN.cpu().numpy().argmax(-1)) / 1024
    bins_B2 = torch.from_numpy(size_BN.reshape(9, 2, 1024).cpu().numpy().argmax(-1)).float()
    expected_B2 = torch.exp2(bins_B2 / 1023 * 10 - 10)
    expected_B2[0::3] = torch.stack([coord_B, torch.zeros(9)], dim=-1)[0::3]
    expected_B2[2::3] = 0.0
    torch.testing.assert_close(payload_B2.cpu(), expected_B2, rtol=1e-6, atol=0.0)
    assert torch.equal(state.payload_R2[row_B], payload_B2)
    assert (state.payload_R2[:3] == 7.0).all()
