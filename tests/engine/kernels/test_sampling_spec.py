"""The device's way to the kept tokens, and certainties, against their definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from legato_engine.kernels.reference import concentration, existence
from legato_engine.runtime import sampler

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

REACH = 48.0  # tokens farther below the highest are never drawn
FIRST_DIGITS = np.float32(21)
DIGIT_BITS = 10
PASSES = 6
ROUNDING = 1e-5  # what float32 sums and scores may be off by


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's sampling constants and its noise key."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 1
    position: int = 0


def masses(x_V: Floats) -> Words:
    """[V] integers, 2^40 for the highest value."""
    return np.rint(np.exp(x_V - x_V.max()) * np.float32(2**40)).astype(np.uint64)


def place(x_V: Floats) -> Words:
    """[V] 48-bit integers, all different: rising with falling value, then with the id."""
    bits_V = (x_V + np.float32(0)).view(np.uint32)
    key_V = np.where(bits_V >> 31, ~bits_V, bits_V | np.uint32(1 << 31))
    return (~key_V).astype(np.uint64) << np.uint64(16) | np.arange(len(x_V), dtype=np.uint64)


def digit(step: int, x_V: Floats) -> npt.NDArray[np.int64]:
    """[V] the token's digit in that pass: by distance from the highest, then of `place`."""
    if step == 0:
        return ((x_V.max() - x_V) * FIRST_DIGITS).astype(np.int64)
    shift = np.uint64((PASSES - 1 - step) * DIGIT_BITS)
    low_V = (place(x_V) << np.uint64(2)) >> shift & np.uint64((1 << DIGIT_BITS) - 1)
    return low_V.astype(np.int64)


def selected(x_V: Floats, top_p: float, top_k: int) -> Bools:
    """[V] the kept tokens that can be drawn, without a sort: the kernel's own steps."""
    candidate_V = x_V.max() - x_V < REACH
    mass_V = np.where(candidate_V, masses(x_V), 0).astype(object)
    total = sum(mass_V)
    limit = total if top_p >= 1 else int(float(np.float32(top_p)) * float(total))
    most = top_k if 0 < top_k < len(x_V) else len(x_V)
    kept_V = np.zeros(len(x_V), bool)
    mass, count = 0, 0
    for step in range(PASSES):
        digit_V = np.where(candidate_V, digit(step, np.where(candidate_V, x_V, x_V.max())), -1)
        for value in np.unique(digit_V[candidate_V]):  # only bins that hold a token
            bin_V = digit_V == value
            mass_after, count_after = mass + sum(mass_V[bin_V]), count + int(bin_V.sum())
            last = value == digit_V.max() or mass_after > limit or count_after >= most
            if last:
                break
            kept_V |= bin_V
            mass, count = mass_after, count_after
        candidate_V = bin_V
        if bin_V.sum() == 1 or (mass_after <= limit and count_after <= most):
            break
    return kept_V | candidate_V


def sorted_kept(x_V: Floats, top_p: float, top_k: int) -> tuple[Bools, Doubles]:
    """[V] the kept tokens by definition with masses of float64, and the share before each."""
    order_V = np.argsort(-x_V.astype(np.float64), kind="stable")
    prob_V = np.exp(x_V.astype(np.float64) - float(x_V.max()))[order_V]
    sums_V = np.concatenate([[0.0], np.cumsum(prob_V)])
    before_V = np.empty(len(x_V))
    before_V[order_V] = sums_V[:-1] / sums_V[-1]
    rank_V = np.empty(len(x_V), np.int64)
    rank_V[order_V] = np.arange(len(x_V))
    kept_V = (before_V <= np.float32(top_p)) & (rank_V < (top_k or len(x_V)))
    kept_V[order_V[0]] = True
    return kept_V, before_V


def random_bits(draw: Draw, count: int) -> Words:
    """[V] the 53 bits of every token's noise."""
    key: Words = _mix(_mix(np.array([draw.seed], np.uint64)) + np.uint64(draw.position))
    keys_V: Words = (key + np.arange(count, dtype=np.uint64)).astype(np.uint64)
    bits_V: Words = _mix(keys_V) >> np.uint64(11)
    return bits_V


def exact_noise(bits_V: Words) -> Doubles:
    """[V] standard Gumbel noise."""
    noise_V: Doubles = -np.log(-np.log((bits_V.astype(np.float64) + 0.5) * 2.0**-53))
    return noise_V


def rough_noise(bits_V: Words) -> Floats:
    """[V] noise in float32 throughout, to select the tokens that need an exact score."""
    low_V = bits_V >> np.uint64(52) == 0
    rest_V = np.where(low_V, bits_V, np.uint64((1 << 53) - 1) - bits_V).astype(np.float32)
    tail_V = (rest_V + np.float32(0.5)) * np.float32(2.0**-53)
    noise_V: Floats = -np.log(np.where(low_V, -np.log(tail_V), -np.log1p(-tail_V)))
    return noise_V


def acceptable(logits_V: Floats, draw: Draw) -> set[int]:
    """Tokens that may be chosen: one, or more where float32 cannot tell."""
    if draw.temperature <= sampler.GREEDY_TEMPERATURE:
        return {int(logits_V.argmax())}
    x_V = logits_V / np.float32(draw.temperature)
    score_V = x_V.astype(np.float64) + exact_noise(random_bits(draw, len(x_V)))
    tokens: set[int] = set()
    for slack in (-ROUNDING, 0.0, ROUNDING):
        top_p = draw.top_p if draw.top_p >= 1 else draw.top_p + slack
        kept_V, _ = sorted_kept(x_V, top_p, draw.top_k)
        kept_score_V = np.where(kept_V, score_V, -np.inf)
        tokens |= set(np.flatnonzero(kept_score_V >= kept_score_V.max() - ROUNDING).tolist())
    return tokens


def _mix(x: Words) -> Words:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def values(kind: str, count: int, seed: int = 0) -> Floats:
    """[V] logits of a kind that is hard in its own way."""
    noise_V = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    masked_V = np.where(np.arange(count) % 7 == 3, noise_V, np.float32(-np.inf))
    kinds: dict[str, npt.NDArray[np.floating]] = {
        "spread": noise_V * 3,
        "ties": np.round(noise_V * 2) / 2,
        "flat": np.zeros(count, np.float32),
        "signed zeros": np.where(noise_V > 0, np.float32(0), np.float32(-0.0)),
        "peak": np.where(np.arange(count) == count // 2, np.float32(80), noise_V),
        "two peaks": np.where(np.arange(count) % (count // 2) == 5, np.float32(30), noise_V),
        "masked": masked_V.astype(np.float32),
        "far": noise_V * 40,
        "near": np.float32(5) + noise_V * np.float32(1e-5),
    }
    return kinds[kind].astype(np.float32)


KINDS = ("spread", "ties", "flat", "signed zeros", "peak", "two peaks", "masked", "far", "near")
LIMITS = [
    (top_p, top_k)
    for top_p in (0.0, 0.05, 0.5, 0.9, 0.999, 1.0)
    for top_k in (0, 1, 2, 7, 50, 10_000)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [64, 1536])
def test_digits_keep_what_the_order_keeps(kind: str, count: int) -> None:
    """Selection by digits is the sorted definition, but for shares that rounding cannot tell."""
    x_V = values(kind, count)
    drawable_V = x_V.max() - x_V < REACH
    for top_p, top_k in LIMITS:
        kept_V, before_V = sorted_kept(x_V, top_p, top_k)
        differ_V = (selected(x_V, top_p, top_k) != kept_V) & drawable_V
        close_V = np.abs(before_V - np.float32(top_p)) < 1e-7
        assert not (differ_V & ~close_V).any(), (top_p, top_k)


@pytest.mark.parametrize("kind", KINDS)
def test_digits_are_exact_in_integers(kind: str) -> None:
    """Selection by digits keeps the same tokens as integer masses summed in falling order."""
    x_V = values(kind, 400, seed=3)
    drawable_V = x_V.max() - x_V < REACH
    mass_V = masses(x_V).astype(object)
    for top_p, top_k in LIMITS:
        total = sum(mass_V[drawable_V])
        limit = total if top_p >= 1 else int(float(np.float32(top_p)) * float(total))
        kept, before = set(), 0
        for rank, token in enumerate(np.argsort(place(x_V)).tolist()):
            if drawable_V[token] and before <= limit and (top_k == 0 or rank < top_k):
                kept.add(token)
            before += mass_V[token]
        assert set(np.flatnonzero(selected(x_V, top_p, top_k)).tolist()) == kept, (top_p, top_k)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "near"])
def test_the_reference_keeps_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sampler.sample` draws a token that noise lifts above all others exactly if it is kept."""
    count = 150
    x_V = values(kind, count, seed=5)
    monkeypatch.setattr(sampler, "gumbel_noise", _lift_one_per_row)
    for top_p, top_k in LIMITS:
        chosen_S = sampler.sample(
            torch.from_numpy(x_V).repeat(count, 1),
            torch.ones(count),
            torch.full((count,), top_p),
            torch.full((count,), top_k),
            torch.zeros(count, dtype=torch.int64),
            torch.arange(count),
        )
        reference_V = chosen_S.numpy() == np.arange(count)
        _, before_V = sorted_kept(x_V, top_p, top_k)
        differ_V = reference_V != selected(x_V, top_p, top_k)
        close_V = np.abs(before_V - np.float32(top_p)) < ROUNDING
        drawable_V = x_V.max() - x_V < REACH
        assert not (differ_V & drawable_V & ~close_V).any(), (top_p, top_k)


def _lift_one_per_row(
    seed_B: torch.Tensor, position_B: torch.Tensor, token_BV: torch.Tensor
) -> torch.Tensor:
    return (token_BV == position_B[:, None]).float() * 1e4


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_chooses_an_acceptable_token(kind: str) -> None:
    """`sampler.sample` chooses what float64 does, up to scores and shares within rounding."""
    draws = [Draw(0.7, top_p, top_k, 2**63 - 5, n) for n, (top_p, top_k) in enumerate(LIMITS)]
    x_V = values(kind, 700, seed=7)
    chosen_S = sampler.sample(
        torch.from_numpy(x_V).repeat(len(draws), 1),
        torch.tensor([draw.temperature for draw in draws]),
        torch.tensor([draw.top_p for draw in draws]),
        torch.tensor([draw.top_k for draw in draws]),
        torch.tensor([draw.seed for draw in draws]),
        torch.tensor([draw.position for draw in draws]),
    )
    allowed = [acceptable(x_V, draw) for draw in draws]
    assert all(int(token) in tokens for token, tokens in zip(chosen_S, allowed, strict=True))
    if kind not in ("flat", "signed zeros", "near"):  # there every share is at a boundary
        assert sum(len(tokens) == 1 for tokens in allowed) > 0.8 * len(allowed)


def test_rough_noise_is_near_and_bounded() -> None:
    """Noise in float32 is within 1e-5 of the exact one, and both within -3.7 .. 37.5."""
    edges = [0, 1, 2, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 2]
    bits_V = np.concatenate([np.array(edges, np.uint64), random_bits(Draw(seed=9), 50_000)])
    exact_V = exact_noise(bits_V)
    assert (np.abs(rough_noise(bits_V) - exact_V) < 1e-5).sum() == len(bits_V) - 1
    assert abs(rough_noise(bits_V)[6] - exact_V[6]) < 1  # the exact sum is rounded itself
    assert exact_V.min() > -3.7
    assert exact_V.max() < 37.5


# ---------------------------------------------------------------- reference certainty
# How sure a model is of a value, against its definition.


def test_existence_is_between_the_token_and_the_end():
    """Other tokens do not matter, and a token is certain where the end is not allowed."""
    logits_BV = torch.tensor([[0.0, 9.0, 1.0], [2.0, -5.0, 1.0], [-math.inf, 0.0, 1.0]])
    seen = existence(logits_BV, torch.tensor([2, 2, 2]), 0).tolist()
    assert seen == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 1.0])


@pytest.mark.parametrize(
    ("chosen", "reach", "near"), [(0, 1, 1 + 2), (3, 1, 3 + 4 + 5), (5, 2, 4 + 5 + 6)]
)
def test_concentration_is_the_mass_around_a_bin(chosen, reach, near):
    """Bins up to the reach count, to both sides, and the edges of the axis cut it."""
    masses = [1, 2, 3, 4, 5, 6]
    logits_BN = torch.tensor(masses).float().log()[None]
    seen = concentration(logits_BN, torch.tensor([chosen]), reach).item()
    assert seen == pytest.approx(near / 21)


def test_rows_do_not_interact():
    """A row has the same bits alone and in any batch."""
    logits_BN = torch.randn(7, 1024, generator=torch.Generator().manual_seed(0)) * 5
    bin_B = logits_BN.argmax(-1)
    together = concentration(logits_BN, bin_B, 32), existence(logits_BN, bin_B, 3)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(concentration(logits_BN[one], bin_B[one], 32), together[0][one])
        assert torch.equal(existence(logits_BN[one], bin_B[one], 3), together[1][one])
