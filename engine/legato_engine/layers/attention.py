"""Attention layers: fused and grouped projections, tau gains.

Shape legend: T tokens, H heads, E head dim, P positions, C = 3 H E features, Z = 2 H gains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from legato_engine.kernels import activations, ops
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, Span
from legato_engine.layers.linear import Linear, PackedLinear, Sum
from legato_engine.layers.lora import LayerAdapters


class Tau(nn.Module):
    """Position and content gains of a head's queries and values.

    A gain is `tanh(w . gelu(qkv)) + 0.5 + sigmoid(alpha ln(p + 1))`.

    The first H rows of `wqwv` make the gains of queries, the others those of values. The table by
    position is float32 whatever the model's dtype, and not in the checkpoint.
    """

    gain_PH: torch.Tensor

    def __init__(self, dim: int, num_heads: int, max_positions: int, gelu: str) -> None:
        """`gelu`: "tanh" for the approximation, else exact."""
        super().__init__()
        self._max_positions = max_positions
        self._approximate = "tanh" if gelu == "tanh" else "none"
        self.wqwv = nn.Parameter(torch.empty(2 * num_heads, 3 * dim))
        self.alpha = nn.Parameter(torch.empty(num_heads))
        empty = torch.empty(max_positions, num_heads, dtype=torch.float32, device="meta")
        self.register_buffer("gain_PH", empty, persistent=False)

    def fill(self) -> None:
        positions_P = torch.arange(self._max_positions, dtype=torch.float32)
        log_P1 = positions_P.log1p()[:, None].to(self.alpha.device)
        self.gain_PH = activations.sigmoid(log_P1 * self.alpha.float()) + 0.5

    def forward(self, qkv_T3HE: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Scale [T, 3, H, E], not yet rotated."""
        features_TC = activations.gelu(qkv_T3HE.flatten(1), self._approximate)
        gain_TZ = ops.linear(features_TC, self.wqwv, None).tanh().float()
        placed_TH = self.gain_PH[positions_T]
        q_TH, v_TH = gain_TZ.chunk(2, dim=1)
        gain_T3H = torch.stack([q_TH + placed_TH, torch.ones_like(q_TH), v_TH + placed_TH], dim=1)
        return (qkv_T3HE * gain_T3H[..., None]).to(qkv_T3HE.dtype)


# ---------------------------------------------------------------- attention

# Shape legend: B rows, T tokens, D width, H heads, E head dim.

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
        """Return x + y, which may reuse the storage of x, and the heads of its norm."""
        x, normed = ops.add_norm(x, y, ln)
        return x, self.split(normed)

    def split(self, x: torch.Tensor) -> Heads:
        return split_heads(self.qkv(x), self._num_heads)

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        """[..., D] of [..., H, E]."""
        return self.proj(heads.flatten(-2))

    def join_onto(self, x: torch.Tensor, heads: torch.Tensor) -> Sum:
        """Add `join` to x, which is not to be read again."""
        return self.proj.onto(x, heads.flatten(-2))


def split_heads(qkv: torch.Tensor, num_heads: int) -> Heads:
    """View [..., 3 D] as three [..., H, E]; attention kernels read them in place."""
    heads = qkv.view(*qkv.shape[:-1], 3, num_heads, -1)
    return heads.select(-3, 0), heads.select(-3, 1), heads.select(-3, 2)


# ---------------------------------------------------------------- grouped attention

# Shape legend: T tokens, D width, G heads of queries, keys and values, H heads, E head dim.

GroupedHeads = torch.Tensor
Attend = Callable[[GroupedHeads, GroupedHeads, GroupedHeads, LayerCache], GroupedHeads]
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
        adapters: LayerAdapters | None = None,
    ) -> torch.Tensor:
        """Write keys and values before attention."""
        qkv = self.qkv(x_TD)
        if adapters is not None:
            qkv = adapters.add(qkv, x_TD, *self.qkv.parts)
        qkv_TGE = qkv.view(x_TD.shape[0], -1, self._heads.head_dim)
        norms = (self.q_norm, self.k_norm) if self.norms_heads else None
        q_THE, k_THE, v_THE = ops.rotate_and_cache(qkv_TGE, where, *cache, norms=norms)
        heads = attend(q_THE, k_THE, v_THE, cache).flatten(-2)
        out = self.o_proj(heads)
        return out if adapters is None else adapters.add(out, heads, "o_proj")
