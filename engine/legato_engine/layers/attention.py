"""Self-attention with a fused input projection.

Shape legend: B rows, T tokens, D width, H heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.layers.linear import Linear


class Attention(nn.Module):
    """The projections; who sees whom is decided by what runs between `split` and `join`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [..., H, E] of [..., D]."""
        qkv: torch.Tensor = self.qkv(x)
        heads = qkv.reshape(*qkv.shape[:-1], 3, self._num_heads, -1)
        return heads.select(-3, 0), heads.select(-3, 1), heads.select(-3, 2)

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        """[..., D] of [..., H, E]."""
        out: torch.Tensor = self.proj(heads.flatten(-2))
        return out
