"""Rotary embedding by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from legato_engine.kernels.reference import rotate
from legato_engine.layers.rope import LinearScaling, Llama3Scaling, Rope


@pytest.fixture
def rope():
    """Theta 10000, 8 rotated dims, 64 positions."""
    rope = Rope(10000.0, 8, 64)
    rope.fill(torch.device("cpu"))
    return rope


def test_pairs_turn_by_their_own_frequency(rope):
    """Dims i and i + 4 turn together by position * theta^(-2i/8)."""
    x_THE = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    positions = [0, 5, 63]
    out_THE = rotate(x_THE, *rope.at(torch.tensor(positions)))
    for t, position in enumerate(positions):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            first, second = x_THE[t, :, i], x_THE[t, :, i + 4]
            turned = first * math.cos(angle) - second * math.sin(angle)
            torch.testing.assert_close(out_THE[t, :, i], turned, atol=1e-5, rtol=1e-5)
            turned = first * math.sin(angle) + second * math.cos(angle)
            torch.testing.assert_close(out_THE[t, :, i + 4], turned, atol=1e-5, rtol=1e-5)


def test_the_rest_of_a_head_passes(rope):
    """Dims after the rotated ones are unchanged."""
    x_THE = torch.randn(3, 2, 12)
    out_THE = rotate(x_THE, *rope.at(torch.tensor([1, 2, 3])))
    assert torch.equal(out_THE[..., 8:], x_THE[..., 8:])


def test_scores_depend_on_distance_only(rope):
    """Moving query and key by the same number of positions leaves their product."""
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at_q, at_k):
        turned_q = rotate(q, *rope.at(torch.tensor([at_q])))
        return (turned_q * rotate(k, *rope.at(torch.tensor([at_k])))).sum()

    torch.testing.assert_close(score(9, 4), score(40, 35), atol=1e-4, rtol=1e-4)


def test_tables_stay_float32_in_bfloat16(rope):
    """The angles are exact in float32 and the result is cast back once."""
    cos, sin = rope.at(torch.tensor([40]))
    out = rotate(torch.ones(1, 1, 12, dtype=torch.bfloat16), cos, sin)
    assert cos.dtype is torch.float32
    assert out.dtype is torch.bfloat16


def speeds(scaling, theta=500_000.0, rotary_dim=64):
    """Radians per position of each pair, from a position near enough to turn none of them round."""
    rope = Rope(theta, rotary_dim, 2, scaling)
    rope.fill(torch.device("cpu"))
    return torch.atan2(rope.sin_PR[1], rope.cos_PR[1]).tolist()


def test_linear_scaling_slows_every_pair():
    """Position p of the longer context has the angle that p / factor had."""
    for slow, fast in zip(speeds(LinearScaling(4.0)), speeds(None), strict=True):
        assert slow == pytest.approx(fast / 4, rel=1e-5)


def test_llama3_scaling_slows_only_the_slow_pairs():
    """Pairs of many turns keep their speed, those of few lose the factor, between them it falls."""
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, first_context=8192)
    for slow, fast in zip(speeds(scaling), speeds(None), strict=True):
        turns = 8192 * fast / (2 * math.pi)
        kept = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        assert slow == pytest.approx(fast * (kept + (1 - kept) / 8), rel=1e-4)
    ratios = [slow / fast for slow, fast in zip(speeds(scaling), speeds(None), strict=True)]
    assert ratios[0] == pytest.approx(1.0, rel=1e-5)
    assert ratios[-1] == pytest.approx(1 / 8, rel=1e-4)
    assert any(0.2 < ratio < 0.9 for ratio in ratios)
