"""Products of packed panels against float64, and their bits.

Shape legend: T rows, I inputs, O outputs, K blocks of 32 inputs.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cpu.decoder import KINDS, PanelWeight

TALLEST = 260
WIDEST = 700


def random(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def packed(library, kind, weight_OI):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return PanelWeight(library, weight_OI.to(dtype), kind)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, TALLEST),
    inputs=st.integers(1, WIDEST),
    outputs=st.integers(1, 150),
    threads=st.integers(1, 3),
    biased=st.booleans(),
)
def test_products_are_those_of_the_packed_weight(
    library, kind, rows, inputs, outputs, threads, biased
):
    """Any shape: within the rounding of float32, and of inputs of 16 bits for int8 and int4.

    With weights in bfloat16 inputs are rounded to that first.
    """
    torch.set_num_threads(threads)
    weight = packed(library, kind, random(outputs, inputs, 1))
    x_TI = random(rows, inputs)
    bias_O = random(1, outputs, 2)[0] if biased else None
    exact_OI = weight.rows(torch.arange(outputs)).double()
    read_TI = x_TI.bfloat16() if kind == "bfloat16" else x_TI
    expected_TO = F.linear(read_TI.double(), exact_OI, None if bias_O is None else bias_O.double())
    found_TO = weight.multiply(x_TI, bias_O).double()
    bound = 1e-6 if kind in ("float32", "bfloat16") else 1e-4
    size = x_TI.double().norm(dim=1, keepdim=True) * exact_OI.norm(dim=1) + 1.0
    assert ((found_TO - expected_TO).abs() / size).max() < bound


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_have_the_same_bits_in_any_batch_and_on_any_number_of_threads(library, kind):
    """A row gives the same bits whichever rows, and however many, run with it."""
    weight, x_TI = packed(library, kind, random(200, 590, 1)), random(TALLEST, 590)
    torch.set_num_threads(2)
    whole_TO = weight.multiply(x_TI, None)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for first, count in ((0, 1), (3, 2), (1, 3), (7, 4), (2, 5), (9, 6), (5, 7), (6, 130)):
            rows = slice(first, first + count)
            assert torch.equal(weight.multiply(x_TI[rows].clone(), None), whole_TO[rows])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("inputs", [590, 33])
def test_avx512_has_the_bits_of_avx2(library, avx2_library, kind, inputs):
    """One row and many, and weights that come back; values far apart among the inputs."""
    x_TI = random(150, inputs) * torch.logspace(-6, 6, 150)[:, None]
    x_TI[5, 7], x_TI[6, 8], x_TI[7] = torch.nan, torch.inf, 0.0
    ours, plain = (packed(each, kind, random(90, inputs, 1)) for each in (library, avx2_library))
    for rows in (1, 2, 6, 7, 150):
        found_TO, expected_TO = (each.multiply(x_TI[-rows:], None) for each in (ours, plain))
        assert torch.equal(found_TO.nan_to_num(7.0), expected_TO.nan_to_num(7.0))
    outputs = torch.arange(90)
    assert torch.equal(ours.rows(outputs), plain.rows(outputs))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_byte_is_packed(library, kind, monkeypatch):
    """Whatever was in the memory, also beyond the last output and input."""

    def bytes_in(filler):
        with monkeypatch.context() as patched:
            patched.setattr(
                torch, "empty", lambda size, dtype: torch.full((size,), filler, dtype=dtype)
            )
            weight = packed(library, kind, random(40, 70))
        linear = weight.described(None)
        return ctypes.string_at(linear.data, weight.nbytes)

    assert bytes_in(0) == bytes_in(255)


@pytest.mark.parametrize(
    ("kind", "most"), [("float32", 0.0), ("bfloat16", 0.0), ("int8", 0.51), ("int4", 0.51)]
)
def test_a_weight_is_rounded_to_the_nearest_value(library, kind, most):
    """By steps of its own block; floats keep their value."""
    weight_OI = random(40, 96, 3)
    if kind == "bfloat16":
        weight_OI = weight_OI.bfloat16().float()
    found_OI = packed(library, kind, weight_OI).rows(torch.arange(40))
    blocks_OKG = weight_OI.unflatten(1, (-1, 32))
    high_OK1, low_OK1 = (each.unsqueeze(2) for each in (blocks_OKG.amax(2), blocks_OKG.amin(2)))
    step_OK1 = (
        torch.maximum(high_OK1, -low_OK1) / 127 if kind == "int8" else (high_OK1 - low_OK1) / 15
    )
    error_OKG = (found_OI - weight_OI).unflatten(1, (-1, 32)).abs()
    assert (error_OKG <= most * step_OK1 + (1e-2 * step_OK1 if kind == "int4" else 0.0)).all()


def test_weights_of_a_gguf_file_keep_their_values(library):
    """Blocks of Q4_1 and of Q8_0, with scales and minima of any half, come back as they are."""
    generator = torch.Generator().manual_seed(0)
    scale_OK1, low_OK1 = (
        random(64, 3, seed).mul(0.01).half().float()[..., None] for seed in (1, 2)
    )
    scale_OK1 = scale_OK1.abs().clamp_min(2e-3).half().float()
    for kind, least, most, low in (("int4", 0, 15, low_OK1), ("int8", -127, 127, 0.0)):
        values_OKG = torch.randint(least, most + 1, (64, 3, 32), generator=generator)
        values_OKG[..., 0], values_OKG[..., 1] = least, most
        weight_OI = (values_OKG * scale_OK1 + low).flatten(1)
        found_OI = PanelWeight(library, weight_OI, kind).rows(torch.arange(64))
        torch.testing.assert_close(found_OI, weight_OI, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(library, kind, odd):
    """A row with one such input has no finite result, and other rows have theirs."""
    x_TI = random(3, 64)
    x_TI[1, 40] = odd
    found_TO = packed(library, kind, random(32, 64, 1)).multiply(x_TI, None)
    assert not found_TO[1].isfinite().any()
    assert found_TO[0].isfinite().all()
    assert found_TO[2].isfinite().all()
