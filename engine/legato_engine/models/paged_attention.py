"""Paged keys and values: positions, pages and masks of a pass.

Shape legend: T tokens of one sequence, B rows of one token, M pages of one sequence.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels import ops, reference
from legato_engine.kernels.pages import (
    AttentionMetadata,
    LayerCache,
    PlacedSpan,
    Span,
    gather_cached,
)
from legato_engine.layers.attention import Attend, GroupedHeads
from legato_engine.layers.lora import AdaptedRows
from legato_engine.layers.rope import Rope


@dataclasses.dataclass(slots=True)
class KVCache:
    """Paged keys and values of all layers.

    `k_LNHSE`, `v_LNHSE`: layer, page, kv head, position within the page, head dim; of the model's
    dtype, or e4m3 in units of `scale_L2` (float32; of keys and of values). Page 0 is scratch:
    padding rows write to it, and its contents are never used.
    """

    k_LNHSE: torch.Tensor
    v_LNHSE: torch.Tensor
    scale_L2: torch.Tensor | None = None

    def layer(self, index: int) -> LayerCache:
        scale_2 = None if self.scale_L2 is None else self.scale_L2[index]
        return LayerCache(self.k_LNHSE[index], self.v_LNHSE[index], scale_2)

    @property
    def page_size(self) -> int:
        return self.k_LNHSE.shape[3]


@dataclasses.dataclass(slots=True)
class DecodeBatch:
    """Positions and page ids (int64) of single-token rows; `adapters` None: no row has one.

    `rope_offset_B` (int64; None: zero) is added to a position for its rotary embedding.
    """

    positions_B: torch.Tensor
    page_table_BM: torch.Tensor
    adapters: AdaptedRows | None = None
    rope_offset_B: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class Chunk:
    """Tokens of one sequence in a pass of fixed shape; those of padding have page 0, position 0.

    `positions_T` and their pages `page_T` are int64; `place_2` (int64) is the first position and
    the number of tokens before the padding; `pages_M` cover all positions up to the last.
    """

    place_2: torch.Tensor
    positions_T: torch.Tensor
    page_T: torch.Tensor
    pages_M: torch.Tensor
    adapters: AdaptedRows | None = None


@dataclasses.dataclass(slots=True)
class VisualRows:
    """The images among T tokens: N of them, at the indices `rows_N`, with K features each.

    The first feature is the token's embedding; feature k is added to it after layer k - 1.
    `rope_3T` (int64): time, row and column of each token for rotary embeddings.
    """

    rope_3T: torch.Tensor
    rows_N: torch.Tensor
    features_NKD: torch.Tensor


@dataclasses.dataclass(slots=True)
class PrefillSpan:
    """Consecutive positions of one sequence; `pages_M` int64 covers `[0, start + T)`.

    `bidirectional`: all attend to each other (image prefix, `start` 0); else causal.
    """

    start: int
    pages_M: torch.Tensor
    bidirectional: bool
    adapters: AdaptedRows | None = None
    visual: VisualRows | None = None  # None: text at its own positions


# ---------------------------------------------------------------- paged attention

# Shape legend: T tokens, B rows of one token, L positions, C sequences of P positions, M pages of
# one.


def span_metadata(span: PrefillSpan, rope: Rope) -> Span:
    return Span(span.start, span.pages_M[None], rope.cos_PR, rope.sin_PR)


def span_attention(span: PrefillSpan, num_tokens: int) -> Attend:
    """Attend within the span, and if causal to all positions before."""
    end = span.start + num_tokens

    def attend(
        q_THE: GroupedHeads, k_THE: GroupedHeads, v_THE: GroupedHeads, cache: LayerCache
    ) -> GroupedHeads:
        if span.bidirectional:
            return ops.full_attention(q_THE[None], k_THE[None], v_THE[None])[0]
        k_LHE, v_LHE = gather_cached(cache, span.pages_M, end, q_THE.dtype)
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

    def attend(
        q_THE: GroupedHeads, _k: GroupedHeads, _v: GroupedHeads, cache: LayerCache
    ) -> GroupedHeads:
        cached = gather_cached(cache, chunk.pages_M, length, q_THE.dtype)
        k_LHE, v_LHE = (each.masked_fill(empty_L11, 0.0) for each in cached)
        return reference.masked_attention(q_THE, k_LHE, v_LHE, visible_TL)

    return attend


def stacked_metadata(pages_CM: torch.Tensor, rope: Rope) -> Span:
    """Locate the first tokens of several sequences of equal length."""
    return Span(0, pages_CM, rope.cos_PR, rope.sin_PR)


def stacked_attention(num_sequences: int) -> Attend:
    """Attend within each of several adjacent sequences, in both directions."""

    def attend(
        q_THE: GroupedHeads, k_THE: GroupedHeads, v_THE: GroupedHeads, _cache: LayerCache
    ) -> GroupedHeads:
        shape = num_sequences, -1, *q_THE.shape[1:]
        q_CPHE, k_CPHE, v_CPHE = (x.view(shape) for x in (q_THE, k_THE, v_THE))
        return ops.full_attention(q_CPHE, k_CPHE, v_CPHE).flatten(0, 1)

    return attend


def step_metadata(batch: DecodeBatch, kv: KVCache, rope: Rope) -> AttentionMetadata:
    index_B1 = (batch.positions_B // kv.page_size)[:, None]
    pages_B = batch.page_table_BM.gather(1, index_B1)[:, 0]
    positions_B = batch.positions_B
    if batch.rope_offset_B is not None:
        positions_B = positions_B + batch.rope_offset_B
    angles = rope.at(positions_B)
    return AttentionMetadata(*angles, pages_B, batch.positions_B % kv.page_size)


def step_attention(batch: DecodeBatch, kv: KVCache) -> Attend:
    """Attend from each token to its sequence up to there."""
    step = ops.step_attention(batch.positions_B, batch.page_table_BM, kv.layer(0))

    def attend(
        q_BHE: GroupedHeads, _k: GroupedHeads, _v: GroupedHeads, cache: LayerCache
    ) -> GroupedHeads:
        return step(q_BHE, cache)

    return attend
