"""Paged keys and values in plain torch, and where tokens of a pass are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch


class LayerCache(NamedTuple):
    """Pages of keys and of values, in the computation's dtype, or in e4m3 in units of `scale_2`.

    N pages, H heads, S positions, E head dim. `scale_2` (float32): of keys, of values.
    """

    k_NHSE: torch.Tensor
    v_NHSE: torch.Tensor
    scale_2: torch.Tensor | None = None


# ---------------------------------------------------------------- pages

# Paged keys and values in plain torch; e4m3 is read in the computation's dtype, rounded once.
#
# Shape legend as in `ops`, but K copies.

E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0


def quantise(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Larger values become the largest, NaN stays."""
    if scale is None:
        return x
    return (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(E4M3)


def dequantise(
    stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return stored if scale is None else (stored.float() * scale).to(dtype)


def units(scale_2: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    return (None, None) if scale_2 is None else scale_2.unbind()


def write_kv(
    cache_NHSE: torch.Tensor, new_THE: torch.Tensor, page_T: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """Write T keys or values of the cache's dtype."""
    indexable(cache_NHSE)[page_T, :, slot_T] = indexable(new_THE)


def copy_pages(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor, pairs_K2: torch.Tensor) -> None:
    source_K, destination_K = pairs_K2.unbind(-1)
    for cache_LNHSE in (indexable(k_LNHSE), indexable(v_LNHSE)):
        cache_LNHSE[:, destination_K] = cache_LNHSE[:, source_K]


def gather_pages(cache_NHSE: torch.Tensor, pages_M: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the first `length` positions as stored, [length, H, E]."""
    num_pages = -(-length // cache_NHSE.shape[2])
    pages_MHSE = taken(cache_NHSE, pages_M[:num_pages])
    return pages_MHSE.transpose(1, 2).flatten(0, 1)[:length]


def gather_cached(
    cache: LayerCache, pages_M: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read [length, H, E], converted to `dtype` if stored as e4m3."""
    k_scale, v_scale = units(cache.scale_2)
    k_LHE = gather_pages(cache.k_NHSE, pages_M, length)
    v_LHE = gather_pages(cache.v_NHSE, pages_M, length)
    return dequantise(k_LHE, k_scale, dtype), dequantise(v_LHE, v_scale, dtype)


def gather_heads(
    cache: LayerCache, pages_M: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read all positions of pages by heads, [H, M * S, E], converted to `dtype`."""
    k_HLE, v_HLE = (
        dequantise(taken(cache_NHSE, pages_M).transpose(0, 1).flatten(1, 2), scale, dtype)
        for cache_NHSE, scale in zip(cache[:2], units(cache.scale_2), strict=True)
    )
    return k_HLE, v_HLE


def taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`index_select` for any dtype."""
    return indexable(x).index_select(0, index).view(x.dtype)


def all_pages(
    cache_NHSE: torch.Tensor,
    page_table_BM: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[B, M * S, H, E]."""
    stored = indexable(cache_NHSE)[page_table_BM].view(cache_NHSE.dtype)
    return dequantise(stored.transpose(2, 3).flatten(1, 2), scale, dtype)


def indexable(x: torch.Tensor) -> torch.Tensor:
    """View as bytes, because some devices cannot index e4m3 tensors."""
    return x.view(torch.uint8) if x.dtype is E4M3 else x


# ---------------------------------------------------------------- spans

# Shape legend: T tokens, C sequences, M pages of a sequence, P positions, R rotated dims of a head.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """T tokens' cosines and sines, and int64 pages and slots."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    page_T: torch.Tensor
    slot_T: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlacedSpan:
    """Consecutive positions of one sequence that only the device knows.

    `start` (int64 [2]): the first of them and the number of tokens before the padding, which
    `positions_T` has at 0, and `page_T` on the scratch page. C is 1.
    """

    start: torch.Tensor
    pages_CM: torch.Tensor
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor
    positions_T: torch.Tensor
    page_T: torch.Tensor

    def metadata(self, count: int, page_size: int) -> AttentionMetadata:
        """Return the metadata of all tokens."""
        del count
        return AttentionMetadata(
            self.cos_PR[self.positions_T][:, None],
            self.sin_PR[self.positions_T][:, None],
            self.page_T,
            self.positions_T % page_size,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive positions, from `start` on, of C sequences with equally many tokens.

    Sequences follow each other. `pages_CM` (int64, contiguous rows) covers earlier positions too;
    the tables are float32 [P, R/2].
    """

    start: int
    pages_CM: torch.Tensor
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def metadata(self, count: int, page_size: int) -> AttentionMetadata:
        """Return the metadata of the first `count` tokens of all sequences."""
        num_sequences = len(self.pages_CM)
        stop = self.start + count // num_sequences
        positions_P = torch.arange(self.start, stop, device=self.pages_CM.device)
        positions_T = positions_P.repeat(num_sequences)
        return AttentionMetadata(
            self.cos_PR[positions_T][:, None],
            self.sin_PR[positions_T][:, None],
            self.pages_CM[:, positions_P // page_size].flatten(),
            positions_T % page_size,
        )
