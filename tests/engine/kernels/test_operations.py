"""Operations of a step agree with their definitions, and every row is treated alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import activations, ops, packed_weights, reference
from legato_engine.kernels.cuda import token_rows
from legato_engine.kernels.packed_weights import (
    FloatWeight,
    Int4Weight,
    Int8Weight,
    RowWeight,
    linear,
    pack,
)
from legato_engine.kernels.pages import LayerCache, Span, gather_pages, write_kv
from legato_engine.layers.attention import Tau
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP

# ---------------------------------------------------------------- attention
# Decode, suffix pass and the write before them agree with attention and rotation written out.

HEADS, HEAD_DIM, PAGE = 3, 8, 4


def attend(q_HE, k_LHE, v_LHE):
    """One query over all of k and v, in float64; its heads in groups where they are more."""
    group = len(q_HE) // k_LHE.shape[1]
    k_LHE, v_LHE = (
        torch.stack([x[:, h // group] for h in range(len(q_HE))], 1) for x in (k_LHE, v_LHE)
    )
    scores_HL = torch.einsum("he,lhe->hl", q_HE.double(), k_LHE.double()) / math.sqrt(HEAD_DIM)
    return torch.einsum("hl,lhe->he", scores_HL.softmax(-1), v_LHE.double()).float()


@pytest.fixture
def cache():
    """Rows of 1, 4, 5 and 12 positions and one of padding; all else in the caches is NaN."""
    generator = torch.Generator().manual_seed(3)
    shape = (12, HEADS, PAGE, HEAD_DIM)
    k_NHSE, v_NHSE = torch.full(shape, math.nan), torch.full(shape, math.nan)
    lengths = [1, 4, 5, 12]
    tables = [[7, 0, 0], [2, 0, 0], [9, 1, 0], [3, 11, 5], [0, 0, 0]]
    k_rows, v_rows = [], []
    for length, pages in zip(lengths, tables, strict=False):
        k_LHE = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        v_LHE = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        position_L = torch.arange(length)
        page_L = torch.tensor(pages)[position_L // PAGE]
        write_kv(k_NHSE, k_LHE, page_L, position_L % PAGE)
        write_kv(v_NHSE, v_LHE, page_L, position_L % PAGE)
        k_rows.append(k_LHE)
        v_rows.append(v_LHE)
    positions_B = torch.tensor([length - 1 for length in lengths] + [0])
    k_NHSE[0, :, 0], v_NHSE[0, :, 0] = 1.0, 2.0  # what padding rows wrote
    return k_NHSE, v_NHSE, positions_B, torch.tensor(tables), k_rows, v_rows


def padded(q_BHE, k_NHSE, v_NHSE, *where):
    """`decode_attention` as a GPU computes it."""
    return reference.decode_attention_padded(q_BHE, LayerCache(k_NHSE, v_NHSE), *where)


@pytest.mark.parametrize("queries", [HEADS, 2 * HEADS, 5 * HEADS])
@pytest.mark.parametrize("decode", [ops.decode_attention, padded])
def test_decode_sees_exactly_its_own_positions(cache, decode, queries):
    """A row attends to its context through its pages, and garbage elsewhere never reaches it."""
    k_NHSE, v_NHSE, positions_B, page_table_BM, k_rows, v_rows = cache
    q_BHE = torch.randn(5, queries, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    out_BHE = decode(q_BHE, k_NHSE, v_NHSE, positions_B, page_table_BM)
    for row in range(4):
        expected_HE = attend(q_BHE[row], k_rows[row], v_rows[row])
        torch.testing.assert_close(out_BHE[row], expected_HE, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(out_BHE[4]).all()


def test_padding_rows_give_zeros_on_the_cpu(cache):
    """A row whose first page is the scratch page is not computed."""
    k_NHSE, v_NHSE, positions_B, page_table_BM, _, _ = cache
    q_BHE = torch.ones(5, HEADS, HEAD_DIM)
    out_BHE = ops.decode_attention(q_BHE, k_NHSE, v_NHSE, positions_B, page_table_BM)
    assert not out_BHE[4].any()


@pytest.mark.parametrize("queries", [HEADS, 4 * HEADS])
@pytest.mark.parametrize("start", [0, 1, 6])
def test_suffix_is_causal_behind_its_context(start, queries):
    """Token t of a suffix sees all of the context and the suffix up to itself."""
    generator = torch.Generator().manual_seed(start)
    q_THE = torch.randn(5, queries, HEAD_DIM, generator=generator)
    k_LHE = torch.randn(start + 5, HEADS, HEAD_DIM, generator=generator)
    v_LHE = torch.randn(start + 5, HEADS, HEAD_DIM, generator=generator)
    out_THE = ops.suffix_attention(q_THE, k_LHE, v_LHE)
    for t in range(5):
        expected_HE = attend(q_THE[t], k_LHE[: start + t + 1], v_LHE[: start + t + 1])
        torch.testing.assert_close(out_THE[t], expected_HE, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [HEADS, 2 * HEADS])
def test_full_attention_sees_all(queries):
    """Every token of a row sees every token of that row."""
    generator = torch.Generator().manual_seed(6)
    q_BTHE = torch.randn(2, 5, queries, HEAD_DIM, generator=generator)
    k_BTHE, v_BTHE = (torch.randn(2, 5, HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    out_BTHE = ops.full_attention(q_BTHE, k_BTHE, v_BTHE)
    for row in range(2):
        for t in range(5):
            expected_HE = attend(q_BTHE[row, t], k_BTHE[row], v_BTHE[row])
            torch.testing.assert_close(out_BTHE[row, t], expected_HE, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 12])
def test_on_the_cpu_a_suffix_has_the_bits_of_its_tokens_one_by_one(cache, count):
    """Wherever a suffix begins, its tokens come out as decode steps would have made them."""
    k_NHSE, v_NHSE, _, page_table_BM, k_rows, v_rows = cache
    generator = torch.Generator().manual_seed(count)
    q_THE = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
    together_THE = ops.suffix_attention(q_THE, k_rows[3], v_rows[3])
    positions_T = torch.arange(12 - count, 12)
    tables_TM = page_table_BM[3].expand(count, -1)
    single_THE = ops.decode_attention(q_THE, k_NHSE, v_NHSE, positions_T, tables_TM)
    assert torch.equal(together_THE, single_THE)


def test_on_the_cpu_rows_of_a_sequence_have_the_bits_of_each_alone(cache):
    """Tokens of a step at several positions of one sequence, in any order, among others."""
    k_NHSE, v_NHSE, _, page_table_BM, _, _ = cache
    rows = [(3, 11), (3, 4), (3, 9), (0, 0), (4, 0), (4, 0), (3, 11), (2, 4), (2, 2)]
    tables_BM = page_table_BM[[row for row, _ in rows]]
    positions_B = torch.tensor([position for _, position in rows])
    q_BHE = torch.randn(9, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(8))
    together_BHE = ops.decode_attention(q_BHE, k_NHSE, v_NHSE, positions_B, tables_BM)
    for row in range(len(rows)):
        only = slice(row, row + 1)
        alone_BHE = ops.decode_attention(
            q_BHE[only], k_NHSE, v_NHSE, positions_B[only], tables_BM[only]
        )
        assert torch.equal(together_BHE[only], alone_BHE)


def test_no_places_for_a_kernel_that_cannot_read_the_cache(monkeypatch):
    """They are tensors of every captured step; off the CPU torch attends without them."""
    monkeypatch.setattr(token_rows, "RowAttention", None)
    with torch.device("meta"):
        pages_NHSE, q_BHE = torch.empty(9, HEADS, PAGE, HEAD_DIM), torch.empty(2, HEADS, HEAD_DIM)
        position_B, table_BM = torch.ones(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
        cache = LayerCache(pages_NHSE, pages_NHSE, None)
        assert ops.step_attention(position_B, table_BM, cache)(q_BHE, cache).shape == q_BHE.shape


def test_gather_reads_what_was_written(cache):
    """Gathered pages are the positions in order, cut to the length asked for."""
    k_NHSE, _, _, page_table_BM, k_rows, _ = cache
    for row, k_LHE in enumerate(k_rows):
        gathered = gather_pages(k_NHSE, page_table_BM[row], len(k_LHE))
        assert torch.equal(gathered, k_LHE)


@pytest.mark.parametrize("queries", [HEADS, 4 * HEADS])
@pytest.mark.parametrize("start", [0, 3, 7])
def test_a_span_turns_and_keeps_keys_and_values(start, queries):
    """Queries and keys of a span are rotated by position; pages hold what attention reads."""
    generator = torch.Generator().manual_seed(start)
    count, half = 6, 2
    angle_PR = torch.rand(start + count, half, generator=generator) * 6
    pages_M = torch.tensor([5, 2, 7, 1])
    span = Span(start, pages_M[None], angle_PR.cos(), angle_PR.sin())
    qkv_TGE = torch.randn(count, queries + 2 * HEADS, HEAD_DIM, generator=generator)
    caches = [torch.full((8, HEADS, PAGE, HEAD_DIM), math.nan) for _ in range(2)]
    q_THE, k_THE, v_THE = ops.rotate_and_cache(qkv_TGE.clone(), span, *caches)
    given = qkv_TGE.split((queries, HEADS, HEADS), dim=1)
    for new_THE, given_THE in zip((q_THE, k_THE), given[:2], strict=True):
        pair_THR = torch.complex(given_THE[..., :half], given_THE[..., half : 2 * half])
        turned_THR = pair_THR * torch.polar(torch.ones(count, 1, half), angle_PR[start:, None])
        torch.testing.assert_close(new_THE[..., :half], turned_THR.real)
        torch.testing.assert_close(new_THE[..., half : 2 * half], turned_THR.imag)
        assert torch.equal(new_THE[..., 2 * half :], given_THE[..., 2 * half :])
    assert torch.equal(v_THE, given[2])
    for cache_NHSE, new_THE in zip(caches, (k_THE, v_THE), strict=True):
        gathered_LHE = gather_pages(cache_NHSE, pages_M, start + count)
        assert torch.equal(gathered_LHE[start:], new_THE)
        assert int(cache_NHSE.isfinite().sum()) == new_THE.numel()


def test_a_span_is_its_positions_one_by_one():
    """A span and the same tokens given by their positions leave the same bits everywhere."""
    generator = torch.Generator().manual_seed(5)
    angle_PR = torch.rand(16, 2, generator=generator)
    span = Span(3, torch.tensor([[2, 3, 1]]), angle_PR.cos(), angle_PR.sin())
    qkv_TGE = torch.randn(7, 3 * HEADS, HEAD_DIM, generator=generator)
    results = []
    for where in (span, span.metadata(7, PAGE)):
        caches = [torch.zeros(4, HEADS, PAGE, HEAD_DIM) for _ in range(2)]
        results.append((*ops.rotate_and_cache(qkv_TGE.clone(), where, *caches), *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_sum_of_three_on_the_cpu_goes_left_to_right():
    """The bits are those of two sums, each rounded."""
    x, y, z = (torch.randn(4, 5).bfloat16() for _ in range(3))
    assert torch.equal(ops.add3(x, y, z), (x + y) + z)


# ---------------------------------------------------------------- activations
# Activations: what they compute, and that an element decides its own bits.
#
# Shape legend: T rows, W width.


def layer(make):
    """A layer of the width and dtype with random weights."""

    def made(width, dtype):
        return make(width).requires_grad_(requires_grad=False).to(dtype)

    return made


def gelu_of_a_layer(width, dtype):
    return layer(lambda width: Linear(width, width))(width, dtype).gelu


def tau(gelu):
    def made(width, dtype):
        tau = Tau(width, 2, 8, gelu).requires_grad_(requires_grad=False)
        tau.wqwv.normal_(0, width**-0.5)
        tau.alpha.normal_()
        tau.to(dtype).fill()

        def run(x_TW):
            qkv_T3HE = x_TW.repeat(1, 3).view(len(x_TW), 3, 2, -1)
            return tau(qkv_T3HE, torch.full((len(x_TW),), 7))

        return run

    return made


def function(run):
    return lambda _width, _dtype: run


RUNS = {
    "gelu": function(activations.gelu),
    "exact gelu": function(lambda x_TW: activations.gelu(x_TW, "none")),
    "silu": function(activations.silu),
    "sigmoid": function(activations.sigmoid),
    "tanh": function(torch.tanh),
    "exp": function(torch.exp),
    "softmax": function(lambda x_TW: x_TW.softmax(-1)),
    "log_softmax": function(lambda x_TW: x_TW.log_softmax(-1)),
    "logsumexp": function(lambda x_TW: x_TW.logsumexp(-1, keepdim=True)),
    "gate": function(lambda x_TW: ops.gate(torch.cat([x_TW, x_TW.flip(-1)], dim=-1))),
    "gate of an expert": function(lambda x_TW: reference.gate(x_TW.repeat(1, 2))),
    "quantised gelu": function(
        lambda x_TW: reference.quantise_gelu(x_TW, torch.ones(x_TW.shape[-1])).values.float()
    ),
    "gelu of a layer": gelu_of_a_layer,
    "MLP": layer(lambda width: MLP(width, 2 * width, width)),
    "tau": tau("tanh"),
    "exact tau": tau("none"),
}


@pytest.fixture
def threads():
    """A test's own number of threads ends with it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 40, 100, 960])
@pytest.mark.parametrize("name", RUNS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name, width, dtype):
    """At both ends of batches that one thread and several compute, with 1, 4 and 8 threads."""
    torch.manual_seed(0)
    run = RUNS[name](width, dtype)
    x_TW = (3 * torch.randn(700, width)).to(dtype)
    rows = (*range(12), 341, 342, 698, 699)
    for count in (1, 4, 8):
        torch.set_num_threads(count)
        alone = {row: run(x_TW[row : row + 1].clone()) for row in rows}
        for first, last in ((0, 2), (0, 3), (1, 12), (340, 343), (0, 700)):
            batch = run(x_TW[first:last].clone())
            for row in rows:
                if first <= row < last:
                    assert torch.equal(batch[row - first], alone[row][0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_the_formulas_rounded_once(dtype):
    """So they are the same on every CPU, with any number of threads."""
    x = torch.cat([torch.linspace(-15, 15, 20_001), torch.tensor([0.0, -100.0, 100.0, torch.nan])])
    x = x.to(dtype)
    wide = x.double().numpy()
    u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore"):
        expected = {
            "gelu": wide / (1 + np.exp(-2 * u)),
            "silu": wide / (1 + np.exp(-wide)),
            "sigmoid": 1 / (1 + np.exp(-wide)),
        }
    for name, values in expected.items():
        ours = getattr(activations, name)(x)
        assert ours.dtype is dtype
        assert torch.equal(ours.nan_to_num(7), torch.from_numpy(values).to(dtype).nan_to_num(7))


# ---------------------------------------------------------------- linear
# The linear map on the CPU treats every row alike.


@pytest.mark.parametrize(("dim", "out"), [(320, 960), (64, 300), (48, 7)])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 13])
@pytest.mark.parametrize("biased", [True, False])
def test_rows_have_the_same_bits_in_any_batch(dim, out, count, biased):
    """A row gives the same bits whichever rows, and however many, run with it."""
    generator = torch.Generator().manual_seed(count)
    x_TD = torch.randn(16, dim, generator=generator)
    weight = torch.randn(out, dim, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    whole = ops.linear(x_TD, weight, bias)
    assert torch.equal(ops.linear(x_TD[:count], weight, bias), whole[:count])
    moved = ops.linear(x_TD[:count].roll(1, 0), weight, bias).roll(-1, 0)
    assert torch.equal(moved, whole[:count])
    torch.testing.assert_close(whole, F.linear(x_TD, weight, bias))


def test_leading_shape_is_kept():
    """Any number of leading dimensions, none of them a multiple of a block."""
    weight, bias = torch.randn(5, 4), torch.randn(5)
    assert ops.linear(torch.randn(2, 3, 4), weight, bias).shape == (2, 3, 5)


# ---------------------------------------------------------------- packed weights
# Packed weights compute what they were packed from, and every row alike.
#
# Shape legend: T rows, I inputs, O outputs.

F32, BF16 = torch.float32, torch.bfloat16


def random(rows, inputs, dtype=F32, seed=0):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", ["model", "int8", "int4"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_packed_rows_have_the_same_bits_in_any_batch(kind, dtype, biased):
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
