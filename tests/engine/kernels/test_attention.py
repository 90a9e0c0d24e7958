"""Decode, suffix pass and the write before them agree with attention and rotation written out."""

from __future__ import annotations

import math

import pytest
import torch
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import token_rows
from legato_engine.kernels.pages import LayerCache, Span

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
        ops.write_kv(k_NHSE, k_LHE, page_L, position_L % PAGE)
        ops.write_kv(v_NHSE, v_LHE, page_L, position_L % PAGE)
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
        gathered = ops.gather_pages(k_NHSE, page_table_BM[row], len(k_LHE))
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
        gathered_LHE = ops.gather_pages(cache_NHSE, pages_M, start + count)
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
