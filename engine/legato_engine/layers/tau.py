"""Tau attention: gains by token and position.

Shape legend: T tokens, H heads, E head dim, P positions, C = 3 H E features, Z = 2 H gains.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import activations, ops


class Tau(nn.Module):
    """Multiplies each head's queries and values by `tanh(w . gelu(qkv)) + 0.5 + sigmoid(alpha ln(p
    + 1))`.

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
