"""Linear maps, and attention on paged keys and values: one signature for CPU and GPU.

Caches are those of `LayerCache`; with e4m3 a token reads the rounded keys and values also in the
pass that computes them. Each head of keys and values serves as many consecutive query heads. On the
CPU the bits of a row of `linear`, `add_low_rank`, `decode_attention` and `experts` depend on that
row and its adapter only: not on other rows, its index or their number.

Shape legend: N pages, S positions per page, H heads, E head dim, T query tokens of one sequence, L
its positions, B rows, M pages per row, P positions, R rotated dims of a head; D width, X experts, K
experts of a token, J = T * K pairs of the two, I and O inputs and outputs of a map; C sequences. Of
adapters: S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import activations, pages, reference
from legato_engine.kernels.cuda import fused_attention, gemm, grouped, prefill, token_rows
from legato_engine.kernels.cuda import norm as norm_kernels
from legato_engine.kernels.cuda import quantise as quantise_kernels
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, PlacedSpan, Span
from legato_engine.kernels.parameters import (
    AdapterRows,
    ExpertAdapters,
    ExpertWeights,
    Quantised,
    Routes,
)

_ALIGNMENT = 16  # bytes of a matrix row's start; libraries are several times slower without it


def tile_counters(count: int, device: torch.device) -> torch.Tensor:
    """Zeroed memory for products: one row each, to be cleared before its next product."""
    return gemm.counters(count, device)


def linear_counted(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counter: torch.Tensor | None,
    *,
    gelu: bool = False,
) -> torch.Tensor | None:
    """Compute `linear` with one of `tile_counters`; None without such a kernel.

    `gelu` applies the tanh form before rounding.
    """
    if bias is None or counter is None or not gemm.can_multiply(x, weight, bias):
        return None
    out = x.new_empty(*x.shape[:-1], len(weight))
    rows_TI, out_TO = x.flatten(0, -2), out.flatten(0, -2)
    gemm.multiply(rows_TI, weight, bias, out_TO, gelu=gelu, counter=counter)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Map [..., in] to [..., out] by a weight [out, in]; missing inputs of x count as zeros."""
    if (missing := weight.shape[-1] - x.shape[-1]) > 0:
        x = F.pad(x, (0, missing))
    if x.device.type == "cpu":
        return reference.linear_rows(x, weight, bias)
    if padding := -x.shape[-1] * x.element_size() % _ALIGNMENT // x.element_size():
        x, weight = F.pad(x, (0, padding)), F.pad(weight, (0, padding))
    return F.linear(x, weight, bias)


def linear_onto(
    to: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add `linear` of x to `to` [..., out], rounded once, or return both terms.

    The sum reuses the storage of `to`, which the caller must not read again.
    """
    if bias is None and token_rows.can_add_product(to, x, weight):
        return to.addmm_(x, weight.t()), None
    if bias is None or not to.is_contiguous() or not gemm.can_multiply(x, weight, bias, to):
        return to, linear(x, weight, bias)
    to_TO = to.flatten(0, -2)
    gemm.multiply(x.flatten(0, -2), weight, bias, to_TO, add_TO=to_TO)
    return to, None


def add_low_rank(
    out_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SRI: torch.Tensor,
    b_SRO: torch.Tensor,
    rows: AdapterRows,
) -> torch.Tensor:
    """Add B(A x) of each token's slot to `out` [T, O] in place, and return it.

    Beyond a slot's own rank both matrices are zero. Can be captured on a GPU.
    """
    if out_TO.device.type == "cpu":
        slots, ranks = rows.slot_T, rows.rank_S
        return reference.add_low_rank_rows(out_TO, x_TI, a_SRI, b_SRO, slots, ranks)
    return reference.add_low_rank_gathered(out_TO, x_TI, a_SRI, b_SRO, rows.slot_T, rows.rank)


def add3(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Add tensors of one shape from left to right, rounded once or twice."""
    if prefill.can_add(x, y, z):
        return prefill.add3(x, y, z)
    return x + y + z


def rotate_and_cache(
    qkv_TGE: torch.Tensor,
    where: AttentionMetadata | Span | PlacedSpan,
    k_NHSE: torch.Tensor,
    v_NHSE: torch.Tensor,
    scale_2: torch.Tensor | None = None,
    *,
    norms: token_rows.Norms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, normed if there are `norms`, and write keys and values.

    `qkv_TGE` has the heads of queries, keys and values. Both caches have one dtype. All three
    results [T, H, E] may be views of `qkv_TGE`, changed in place.
    """
    num_kv = k_NHSE.shape[1]
    num_heads = qkv_TGE.shape[1] - 2 * num_kv
    q_THE, k_THE, v_THE = torch.split(qkv_TGE, [num_heads, num_kv, num_kv], dim=1)
    if norms is not None:
        if not isinstance(where, AttentionMetadata):
            where = where.metadata(qkv_TGE.shape[0], k_NHSE.shape[2])
        cos_T1R = where.cos_T1R
        by_kernel = token_rows.can_rotate(qkv_TGE, cos_T1R, k_NHSE)
        if not by_kernel or not token_rows.can_norm(norms, cos_T1R.shape[-1]):
            q_THE.copy_(norms[0](q_THE))
            k_THE.copy_(norms[1](k_THE))
            norms = None
    if not isinstance(where, AttentionMetadata):
        if num_heads == num_kv and prefill.can_rotate(qkv_TGE, where.cos_PR, k_NHSE):
            qkv_CP3HE = qkv_TGE.view(len(where.pages_CM), -1, 3, num_kv, qkv_TGE.shape[-1])
            rotation = where.cos_PR, where.sin_PR, where.start, where.pages_CM
            prefill.rotate_and_cache(qkv_CP3HE, *rotation, k_NHSE, v_NHSE, scale_2)
            return q_THE, k_THE, v_THE
        where = where.metadata(qkv_TGE.shape[0], k_NHSE.shape[2])
    if token_rows.can_rotate(qkv_TGE, where.cos_T1R, k_NHSE):
        angles, places = (where.cos_T1R, where.sin_T1R), (where.page_T, where.slot_T)
        token_rows.rotate_and_cache(qkv_TGE, angles, places, k_NHSE, v_NHSE, norms)
        return q_THE, k_THE, v_THE
    turned_TGE = reference.rotate(qkv_TGE[:, :-num_kv], where.cos_T1R, where.sin_T1R)
    q_THE, k_THE = torch.split(turned_TGE, [num_heads, num_kv], dim=1)
    k_scale, v_scale = pages.units(scale_2)
    k_THE = _write_and_read(k_NHSE, k_THE, where, k_scale)
    v_THE = _write_and_read(v_NHSE, v_THE, where, v_scale)
    return q_THE, k_THE, v_THE


def _write_and_read(
    cache_NHSE: torch.Tensor,
    new_THE: torch.Tensor,
    where: AttentionMetadata,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    stored_THE = pages.quantise(new_THE, scale)
    pages.write_kv(cache_NHSE, stored_THE, where.page_T, where.slot_T)
    return pages.dequantise(stored_THE, scale, new_THE.dtype)


def gate(both_T2F: torch.Tensor) -> torch.Tensor:
    """Silu of the first half times the second, [..., F], rounded once or twice."""
    if token_rows.can_gate(both_T2F):
        return token_rows.gate(both_T2F)
    gate_TF, up_TF = both_T2F.chunk(2, dim=-1)
    return activations.silu(gate_TF) * up_TF


def copy_pages(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor, pairs_K2: torch.Tensor) -> None:
    """Copy pages in all layers (L), by int64 (source, destination) on the caches' device.

    No source is another pair's destination; it may be its own.
    """
    if prefill.can_copy(k_LNHSE, v_LNHSE):
        prefill.copy_pages(k_LNHSE, v_LNHSE, pairs_K2)
    else:
        pages.copy_pages(k_LNHSE, v_LNHSE, pairs_K2)


def full_attention(
    q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor
) -> torch.Tensor:
    """Attention [B, T, H, E] of every token to every token of its row."""
    if fused_attention.can_attend(q_BTHE, k_BTHE, v_BTHE):
        return fused_attention.attend(q_BTHE, k_BTHE, v_BTHE)
    return reference.full_attention(q_BTHE, k_BTHE, v_BTHE)


def suffix_attention(q_THE: torch.Tensor, k_LHE: torch.Tensor, v_LHE: torch.Tensor) -> torch.Tensor:
    """Attention [T, H, E] of the last T of L positions to themselves and all before.

    On the CPU a token has the bits of `decode_attention`, however much of the sequence was cached.
    """
    if q_THE.device.type == "cpu":
        return reference.suffix_attention_rows(q_THE, k_LHE, v_LHE)
    return reference.suffix_attention(q_THE, k_LHE, v_LHE)


def decode_attention(
    q_BHE: torch.Tensor,
    k_NHSE: torch.Tensor,
    v_NHSE: torch.Tensor,
    positions_B: torch.Tensor,
    page_table_BM: torch.Tensor,
    scale_2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, H, E] of one token per row to positions 0..positions_B[b] of its pages.

    A row whose first page is 0 is padding: zeros on the CPU, any finite values on a GPU, where the
    call can be captured.
    """
    cache = LayerCache(k_NHSE, v_NHSE, scale_2)
    return step_attention(positions_B, page_table_BM, cache)(q_BHE, cache)


def step_attention(
    positions_B: torch.Tensor, page_table_BM: torch.Tensor, like: LayerCache
) -> Callable[[torch.Tensor, LayerCache], torch.Tensor]:
    """`decode_attention` of all layers of a step, whose caches are like `like`.

    What all layers share is computed here, once: on a CPU the host reads the tables, and a kernel's
    places are complete before the first layer, because it reads them before its predecessor ends.
    """
    if positions_B.device.type == "cpu":
        contexts = reference.contexts(positions_B, page_table_BM, like.k_NHSE.shape[2])
        return lambda q_BHE, cache: reference.decode_attention_rows(q_BHE, cache, contexts)
    rows: token_rows.RowAttention | None = None
    if token_rows.can_read(page_table_BM, like):
        rows = token_rows.RowAttention(positions_B, page_table_BM)

    def attend(q_BHE: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        if rows is not None and token_rows.can_attend(page_table_BM, cache, q_BHE):
            return rows(q_BHE, cache)
        return reference.decode_attention_padded(q_BHE, cache, positions_B, page_table_BM)

    return attend


def route(logits_TX: torch.Tensor, num_active: int) -> Routes:
    """Choose each token's likeliest experts, weighted by a softmax over these only."""
    best_TK, expert_TK = logits_TX.topk(num_active, dim=-1)
    return Routes(expert_TK, best_TK.float().softmax(-1).to(logits_TX.dtype))


def can_group(x_TD: torch.Tensor, up: ExpertWeights, down: ExpertWeights) -> bool:
    """Return whether `experts` of such tokens reads nothing on the host, capturable or not."""
    return grouped.can_group(x_TD, up, down)


def experts(
    x_TD: torch.Tensor,
    routes: Routes,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    capturable: bool,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Sum each token's experts by their shares, [T, D].

    An expert is `down(gelu(u) * (g + 1))`, gelu exact, where u and g are the halves of `up(x)`. On
    a GPU a `capturable` call reads nothing on the host, and no shape depends on the routes.
    """
    if grouped.can_group(x_TD, up, down):
        return grouped.experts(x_TD, routes, up, down, adapters)
    if capturable and x_TD.device.type != "cpu":
        return reference.experts_gathered(x_TD, routes, up, down, adapters)
    return reference.experts_sorted(x_TD, routes, up, down, adapters)


# ---------------------------------------------------------------- row ops

# Norms of residual sums, and quantisation to e4m3, row by row.
#
# Sums are rounded once, to their terms' dtype. Norms and gelus are float32, rounded to that dtype
# unless they are quantised. A quantised row is divided by its scale, amax / 448.
#
# Shape legend: K values of a row; `...` any leading dimensions.


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y (x itself without y) and its layer norm over K, in `out` if given.

    y may repeat over its first dimension. The last write to either must come from a kernel, not
    from a copy. The sum may reuse x, which the caller must own and not read again.
    """
    if (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        x, normed = reference.add_norm(x, y, norm)
        return x, normed if out is None else out.copy_(normed)
    return kernels.add_norm(x, y, norm, out)


def add3_norm(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `add_norm`, of x + y + z of one shape, rounded once or twice.

    The sum may reuse y, not x.
    """
    if z.shape != y.shape or (kernels := norm_kernels.kernels_for(x, y, norm, z)) is None:
        return reference.add_norm(x + y, z, norm)
    return kernels.add3_norm(x, y, z, norm)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `add_norm`, with y of the shape of x."""
    if norm.eps is None or (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        x = x if y is None else x + y
        return x, norm(x)
    return kernels.add_rms_norm(x, y, norm)


def add_norm_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    """Like `add_norm`, with the norm quantised; a GPU needs `can_multiply_e4m3`."""
    if (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        return reference.add_norm_quantised(x, y, norm)
    return kernels.add_norm_quantised(x, y, norm)


def quantise(x: torch.Tensor) -> Quantised:
    if (kernels := quantise_kernels.kernels_for(x)) is None:
        return reference.quantise(x)
    return kernels.launch(kernels.plain, x, overlap=False)


def quantise_gelu(x: torch.Tensor, centre_K: torch.Tensor) -> Quantised:
    """Quantise the gelu (tanh form) of [..., K] less a centre.

    A kernel and no copy has written x; the centre has its dtype and was written long before.
    """
    if (kernels := quantise_kernels.kernels_for(x)) is None:
        return reference.quantise_gelu(x, centre_K)
    return kernels.launch(kernels.gelu, x, centre_K, overlap=True)


def can_multiply_e4m3(device: torch.device) -> bool:
    """Return whether the device multiplies e4m3 matrices; the CPU emulates it."""
    return device.type == "cpu" or quantise_kernels.has_e4m3(device)
