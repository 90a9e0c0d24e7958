"""Positions, pages and masks of a decoder's passes.

Shape legend: T tokens, B rows of one token, L positions, C sequences of P positions, M pages of
one.
"""

from __future__ import annotations

import torch

from legato_engine.kernels import ops
from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.kernels.spans import AttentionMetadata, PlacedSpan, Span
from legato_engine.layers.grouped_attention import Attend, Heads
from legato_engine.layers.rope import Rope
from legato_engine.models.paged_cache import Chunk, DecodeBatch, KVCache, PrefillSpan


def span_metadata(span: PrefillSpan, rope: Rope) -> Span:
    return Span(span.start, span.pages_M[None], rope.cos_PR, rope.sin_PR)


def span_attention(span: PrefillSpan, num_tokens: int) -> Attend:
    """Attend within the span, and if causal to all positions before."""
    end = span.start + num_tokens

    def attend(q_THE: Heads, k_THE: Heads, v_THE: Heads, cache: LayerCache) -> Heads:
        if span.bidirectional:
            return ops.full_attention(q_THE[None], k_THE[None], v_THE[None])[0]
        k_LHE, v_LHE = ops.gather_cached(cache, span.pages_M, end, q_THE.dtype)
        return ops.suffix_attention(q_THE, k_LHE, v_LHE)

    return attend


def chunk_metadata(chunk: Chunk, rope: Rope) -> PlacedSpan:
    tables = rope.cos_PR, rope.sin_PR
    tokens = chunk.positions_T, chunk.page_T
    return PlacedSpan(chunk.place_2, chunk.pages_M[None], *tables, *tokens)


def chunk_attention(chunk: Chunk, kv: KVCache) -> Attend:
    """Attend from each token to its sequence up to there; can be captured."""
    length = len(chunk.pages_M) * kv.page_size
    position_L = torch.arange(length, device=chunk.positions_T.device)
    visible_TL = position_L <= chunk.positions_T[:, None]
    # Positions after the last one may hold NaN.
    empty_L11 = (position_L > chunk.positions_T.max())[:, None, None]

    def attend(q_THE: Heads, _k: Heads, _v: Heads, cache: LayerCache) -> Heads:
        cached = ops.gather_cached(cache, chunk.pages_M, length, q_THE.dtype)
        k_LHE, v_LHE = (each.masked_fill(empty_L11, 0.0) for each in cached)
        return ops.masked_attention(q_THE, k_LHE, v_LHE, visible_TL)

    return attend


def stacked_metadata(pages_CM: torch.Tensor, rope: Rope) -> Span:
    """Locate the first tokens of several sequences of equal length."""
    return Span(0, pages_CM, rope.cos_PR, rope.sin_PR)


def stacked_attention(num_sequences: int) -> Attend:
    """Attend within each of several adjacent sequences, in both directions."""

    def attend(q_THE: Heads, k_THE: Heads, v_THE: Heads, _cache: LayerCache) -> Heads:
        shape = num_sequences, -1, *q_THE.shape[1:]
        q_CPHE, k_CPHE, v_CPHE = (x.view(shape) for x in (q_THE, k_THE, v_THE))
        return ops.full_attention(q_CPHE, k_CPHE, v_CPHE).flatten(0, 1)

    return attend


def step_metadata(batch: DecodeBatch, kv: KVCache, rope: Rope) -> AttentionMetadata:
    index_B1 = (batch.positions_B // kv.page_size)[:, None]
    pages_B = batch.page_table_BM.gather(1, index_B1)[:, 0]
    angles = rope.at(batch.positions_B)
    return AttentionMetadata(*angles, pages_B, batch.positions_B % kv.page_size)


def step_attention(batch: DecodeBatch, kv: KVCache) -> Attend:
    """Attend from each token to its sequence up to there."""
    step = ops.step_attention(batch.positions_B, batch.page_table_BM, kv.layer(0))

    def attend(q_BHE: Heads, _k: Heads, _v: Heads, cache: LayerCache) -> Heads:
        return step(q_BHE, cache)

    return attend
