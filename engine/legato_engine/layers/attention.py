"""Self-attention with a fused input projection.

Shape legend: B rows, T tokens, D width, H heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels.cuda import norm
from legato_engine.layers.linear import Linear
from legato_engine.layers.tau import Tau

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values


class Attention(nn.Module):
    """The projections; who sees whom is decided by what runs between `split` and `join`.

    `tau` changes what `qkv` makes, by who runs it: `split` knows no positions.
    """

    def __init__(self, dim: int, num_heads: int, tau: Tau | None = None) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.tau = tau
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def after_norm(
        self, x: torch.Tensor, y: torch.Tensor, ln: nn.LayerNorm
    ) -> tuple[torch.Tensor, Heads]:
        """The sum x + y, whose storage may be x's, and what `split` makes of its norm."""
        x, normed = norm.add_norm(x, y, ln)
        return x, self.split(normed)

    def split(self, x: torch.Tensor) -> Heads:
        """Queries, keys and values [..., H, E] of [..., D]."""
        return split_heads(self.qkv(x), self._num_heads)

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        """[..., D] of [..., H, E]."""
        out: torch.Tensor = self.proj(heads.flatten(-2))
        return out


def split_heads(qkv: torch.Tensor, num_heads: int) -> Heads:
    """Views [..., H, E] of [..., 3 D], which kernels of attention read where they are."""
    heads = qkv.view(*qkv.shape[:-1], 3, num_heads, -1)
    return heads.select(-3, 0), heads.select(-3, 1), heads.select(-3, 2)
