"""Self-attention on paged keys and values, where query heads may share a key head.

Shape legend: T tokens, D width, G heads of queries, keys and values, H heads, E head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from legato_engine.kernels import ops
from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.kernels.spans import AttentionMetadata, Span
from legato_engine.layers.linear import Linear, PackedLinear

Heads = torch.Tensor
Attend = Callable[[Heads, Heads, Heads, LayerCache], Heads]
"""Takes queries, keys and values of the new tokens and one layer's cache, already written."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadPlan:
    """Heads, biases and norms; `num_heads` is a multiple of `num_kv_heads`.

    With a `norm_eps`, queries and keys are RMS-normed per head before rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    norm_eps: float | None = None


class GroupedAttention(nn.Module):
    """Projections, rotation and the write to the cache; `attend` computes attention."""

    def __init__(self, dim: int, heads: HeadPlan) -> None:
        super().__init__()
        self._heads = heads
        queries, keys = (n * heads.head_dim for n in (heads.num_heads, heads.num_kv_heads))
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = PackedLinear(dim, parts, bias=heads.qkv_bias)
        self.o_proj = Linear(queries, dim, bias=heads.out_bias)
        self.norms_heads = heads.norm_eps is not None
        if heads.norm_eps is not None:
            self.q_norm = nn.RMSNorm(heads.head_dim, eps=heads.norm_eps)
            self.k_norm = nn.RMSNorm(heads.head_dim, eps=heads.norm_eps)

    def forward(
        self,
        x_TD: torch.Tensor,
        where: AttentionMetadata | Span,
        cache: LayerCache,
        attend: Attend,
    ) -> torch.Tensor:
        """Write keys and values before attention."""
        qkv_TGE: torch.Tensor = self.qkv(x_TD).view(x_TD.shape[0], -1, self._heads.head_dim)
        if self._heads.norm_eps is not None:
            self._norm(qkv_TGE)
        q_THE, k_THE, v_THE = ops.rotate_and_cache(qkv_TGE, where, *cache)
        out: torch.Tensor = self.o_proj(attend(q_THE, k_THE, v_THE, cache).flatten(-2))
        return out

    def _norm(self, qkv_TGE: torch.Tensor) -> None:
        num_heads, num_kv = self._heads.num_heads, self._heads.num_kv_heads
        q_THE, k_THE = qkv_TGE[:, :num_heads], qkv_TGE[:, num_heads : num_heads + num_kv]
        q_THE.copy_(self.q_norm(q_THE))
        k_THE.copy_(self.k_norm(k_THE))
