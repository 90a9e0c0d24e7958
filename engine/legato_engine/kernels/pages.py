"""Paged keys and values in plain torch; e4m3 is read in the computation's dtype, rounded once.

Shape legend as in `ops`, but K copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.layer_cache import LayerCache

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
    indexable(cache_NHSE)[page_T, :, slot_T] = indexable(new_THE)


def copy_pages(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor, pairs_K2: torch.Tensor) -> None:
    source_K, destination_K = pairs_K2.unbind(-1)
    for cache_LNHSE in (indexable(k_LNHSE), indexable(v_LNHSE)):
        cache_LNHSE[:, destination_K] = cache_LNHSE[:, source_K]


def gather_pages(cache_NHSE: torch.Tensor, pages_M: torch.Tensor, length: int) -> torch.Tensor:
    num_pages = -(-length // cache_NHSE.shape[2])
    pages_MHSE = taken(cache_NHSE, pages_M[:num_pages])
    return pages_MHSE.transpose(1, 2).flatten(0, 1)[:length]


def gather_cached(
    cache: LayerCache, pages_M: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
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
