"""Packed weights compute what they were packed from, and every row alike.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import packed_weights
from legato_engine.kernels.packed_weights import (
    FloatWeight,
    Int4Weight,
    Int8Weight,
    RowWeight,
    linear,
    pack,
)

F32, BF16 = torch.float32, torch.bfloat16


def random(rows, inputs, dtype=F32, seed=0):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", ["model", "int8", "int4"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_have_the_same_bits_in_any_batch(kind, dtype, biased):
    """A row gives the same bits whichever rows, and however many, run with it."""
    x_TI, weight_OI = random(24, 288, dtype), random(256, 288, dtype, seed=1)
    bias_O = random(1, 256, dtype, seed=2)[0] if biased else None
    packed = pack(weight_OI, kind)
    assert packed is not None
    whole_TO = linear(x_TI, packed, bias_O)
    assert whole_TO.dtype == dtype
    for count in (1, 2, 3, 5, 7, 8, 9, 13):
        for first in (0, 1, 6):
            rows = slice(first, first + count)
            assert torch.equal(linear(x_TI[rows], packed, bias_O), whole_TO[rows])


@pytest.mark.parametrize(
    ("made", "dtype", "most"),
    [
        (FloatWeight, F32, 1e-6),
        (RowWeight, BF16, 6e-3),
        (Int8Weight, F32, 8e-3),
        (Int4Weight, F32, 8e-2),
    ],
)
def test_results_are_near_those_of_the_weight(made, dtype, most):
    """By the norm of the difference: a kind's rounding, and no more."""
    x_TI, weight_OI = random(9, 320, dtype), random(304, 320, dtype, seed=1)
    bias_O = random(1, 304, dtype, seed=2)[0]
    expected_TO = F.linear(x_TI.double(), weight_OI.double(), bias_O.double())
    found_TO = linear(x_TI, made(weight_OI), bias_O).double()
    assert (found_TO - expected_TO).norm() / expected_TO.norm() < most


def test_four_bits_keep_weights_that_have_four_bits():
    """Weights of a GGUF's Q4_1 with short scales come back as they are."""
    generator = torch.Generator().manual_seed(0)
    codes_OKG = torch.randint(0, 16, (16, 2, 32), generator=generator)
    codes_OKG[..., 0], codes_OKG[..., 1] = 0, 15
    weight_OI = (codes_OKG * 0.125 - 1.0).flatten(1)
    identity = torch.eye(64)
    assert torch.equal(linear(identity, Int4Weight(weight_OI), None).t(), weight_OI)


def test_leading_shape_is_kept_and_missing_inputs_are_zeros():
    """As of `ops.linear`."""
    weight_OI = random(256, 320, seed=1)
    x = random(6, 300).view(2, 3, 300) * 0.05
    found = linear(x, FloatWeight(weight_OI), None)
    torch.testing.assert_close(found, F.linear(x, weight_OI[:, :300]))


def test_what_does_not_fit_stays():
    """Small maps, and with int4 those of other sizes."""
    assert pack(random(16, 32), "int8") is None
    assert pack(random(300, 320), "int4") is None
    assert isinstance(pack(random(304, 320), "int4"), Int4Weight)


def test_a_library_that_rounds_a_batch_otherwise_is_not_used(monkeypatch):
    """The weight stays a plain one, in whole blocks of rows."""

    def by_count(self, rows_TI, bias_O):
        return torch.full((len(rows_TI), self.out_features), float(len(rows_TI)))

    monkeypatch.setattr(FloatWeight, "multiply", by_count)
    packed_weights._rounds_alike.cache_clear()
    try:
        assert pack(random(256, 264), "model") is None
    finally:
        packed_weights._rounds_alike.cache_clear()
