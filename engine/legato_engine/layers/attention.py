"""Self-attention with a fused input projection.

Shape legend: B rows, T tokens, D width, H heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import row_ops
from legato_engine.layers.linear import Linear, Sum
from legato_engine.layers.tau import Tau

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values


class Attention(nn.Module):
    """Projections; the caller computes attention between `split` and `join`.

    The caller applies `tau` after `qkv`, because `split` knows no positions. Keys and values in
    e4m3 have units of `k_scale` and `v_scale` (float32, one element).
    """

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def __init__(self, dim: int, num_heads: int, tau: Tau | None = None) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.tau = tau
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)
        self.register_buffer("k_scale", None)
        self.register_buffer("v_scale", None)

    def use_fp8_kv(self) -> None:
        """Allocate scales, to be loaded."""
        empty_1 = torch.empty(1, dtype=torch.float32, device=self.qkv.weight.device)
        self.k_scale, self.v_scale = empty_1, empty_1.clone()

    @property
    def kv_scale_2(self) -> torch.Tensor | None:
        if self.k_scale is None or self.v_scale is None:
            return None
        return torch.cat([self.k_scale, self.v_scale])

    def after_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, ln: nn.LayerNorm
    ) -> tuple[torch.Tensor, Heads]:
        """The sum x + y may reuse the storage of x."""
        x, normed = row_ops.add_norm(x, y, ln)
        return x, self.split(normed)

    def split(self, x: torch.Tensor) -> Heads:
        return split_heads(self.qkv(x), self._num_heads)

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        """[..., D] of [..., H, E]."""
        out: torch.Tensor = self.proj(heads.flatten(-2))
        return out

    def join_onto(self, x: torch.Tensor, heads: torch.Tensor) -> Sum:
        """Add `join` to x, which is not to be read again."""
        return self.proj.onto(x, heads.flatten(-2))


def split_heads(qkv: torch.Tensor, num_heads: int) -> Heads:
    """Views [..., H, E] of [..., 3 D]; attention kernels read them in place."""
    heads = qkv.view(*qkv.shape[:-1], 3, num_heads, -1)
    return heads.select(-3, 0), heads.select(-3, 1), heads.select(-3, 2)
