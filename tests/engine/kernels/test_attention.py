"""Both decode variants, and the suffix pass, agree with attention written out."""

from __future__ import annotations

import math

import pytest
import torch
from legato_engine.kernels import ops, reference

HEADS, HEAD_DIM, PAGE = 3, 8, 4


def attend(q_HE, k_LHE, v_LHE):
    """One query over all of k and v, in float64."""
    scores_HL = torch.einsum("he,lhe->hl", q_HE.double(), k_LHE.double()) / math.sqrt(HEAD_DIM)
    return torch.einsum("hl,lhe->he", scores_HL.softmax(-1), v_LHE.double()).float()


@pytest.fixture
def cache():
    """Rows of 1, 4, 5 and 12 positions and one of padding; all else in the caches is NaN."""
    generator = torch.Generator().manual_seed(3)
    shape = (12, PAGE, HEADS, HEAD_DIM)
    k_NSHE, v_NSHE = torch.full(shape, math.nan), torch.full(shape, math.nan)
    lengths = [1, 4, 5, 12]
    tables = [[7, 0, 0], [2, 0, 0], [9, 1, 0], [3, 11, 5], [0, 0, 0]]
    k_rows, v_rows = [], []
    for length, pages in zip(lengths, tables, strict=False):
        k_LHE = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        v_LHE = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        position_L = torch.arange(length)
        page_L = torch.tensor(pages)[position_L // PAGE]
        ops.write_kv(k_NSHE, k_LHE, page_L, position_L % PAGE)
        ops.write_kv(v_NSHE, v_LHE, page_L, position_L % PAGE)
        k_rows.append(k_LHE)
        v_rows.append(v_LHE)
    positions_B = torch.tensor([length - 1 for length in lengths] + [0])
    k_NSHE[0, 0], v_NSHE[0, 0] = 1.0, 2.0  # what padding rows wrote
    return k_NSHE, v_NSHE, positions_B, torch.tensor(tables), k_rows, v_rows


@pytest.mark.parametrize(
    "decode", [reference.decode_attention_rows, reference.decode_attention_padded]
)
def test_decode_sees_exactly_its_own_positions(cache, decode):
    """A row attends to its context through its pages, and garbage elsewhere never reaches it."""
    k_NSHE, v_NSHE, positions_B, page_table_BM, k_rows, v_rows = cache
    q_BHE = torch.randn(5, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    out_BHE = decode(q_BHE, k_NSHE, v_NSHE, positions_B, page_table_BM)
    for row in range(4):
        expected_HE = attend(q_BHE[row], k_rows[row], v_rows[row])
        torch.testing.assert_close(out_BHE[row], expected_HE, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(out_BHE[4]).all()


def test_padding_rows_give_zeros_on_the_cpu(cache):
    """A row whose first page is the scratch page is not computed."""
    k_NSHE, v_NSHE, positions_B, page_table_BM, _, _ = cache
    q_BHE = torch.ones(5, HEADS, HEAD_DIM)
    out_BHE = ops.decode_attention(q_BHE, k_NSHE, v_NSHE, positions_B, page_table_BM)
    assert not out_BHE[4].any()


@pytest.mark.parametrize("start", [0, 1, 6])
def test_suffix_is_causal_behind_its_context(start):
    """Token t of a suffix sees all of the context and the suffix up to itself."""
    generator = torch.Generator().manual_seed(start)
    q_THE = torch.randn(5, HEADS, HEAD_DIM, generator=generator)
    k_LHE = torch.randn(start + 5, HEADS, HEAD_DIM, generator=generator)
    v_LHE = torch.randn(start + 5, HEADS, HEAD_DIM, generator=generator)
    out_THE = ops.suffix_attention(q_THE, k_LHE, v_LHE)
    for t in range(5):
        expected_HE = attend(q_THE[t], k_LHE[: start + t + 1], v_LHE[: start + t + 1])
        torch.testing.assert_close(out_THE[t], expected_HE, rtol=1e-5, atol=1e-5)


def test_gather_reads_what_was_written(cache):
    """Gathered pages are the positions in order, cut to the length asked for."""
    k_NSHE, _, _, page_table_BM, k_rows, _ = cache
    for row, k_LHE in enumerate(k_rows):
        gathered = ops.gather_pages(k_NSHE, page_table_BM[row], len(k_LHE))
        assert torch.equal(gathered, k_LHE)
