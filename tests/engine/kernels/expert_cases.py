"""Experts and tokens for their operation, and the formula.

Shape legend as in `kernels.ops`.
"""

from __future__ import annotations

import math

import torch
from legato_engine.kernels import ops
from legato_engine.kernels.parameters import ExpertWeights

NUM_EXPERTS, NUM_ACTIVE, DIM, INNER = 7, 3, 48, 40


def layers(seed=0, dtype=torch.float32):
    """Both layers of all experts."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(NUM_EXPERTS, 2 * INNER, DIM, generator=generator) / math.sqrt(DIM)
    down = torch.randn(NUM_EXPERTS, DIM, INNER, generator=generator) / math.sqrt(INNER)
    return ExpertWeights(up.to(dtype), None), ExpertWeights(down.to(dtype), None)


def quantised(layer):
    """The layer in e4m3 with a scale for each output."""
    scale_XO = layer.weight_XOI.abs().amax(-1) / 448
    return ExpertWeights((layer.weight_XOI / scale_XO[..., None]).to(torch.float8_e4m3fn), scale_XO)


def dequantised(layer):
    """The same numbers as plain weights."""
    weight_XOI = layer.weight_XOI.double() * layer.scale_XO.double()[..., None]
    return ExpertWeights(weight_XOI.float(), None)


def tokens(count, seed=0):
    """Rows, and the routes that random logits give them."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(count, DIM, generator=generator)
    logits_TX = torch.randn(count, NUM_EXPERTS, generator=generator)
    return x_TD, ops.route(logits_TX, NUM_ACTIVE)


def by_hand(x_TD, routes, up, down):
    """Token by token and expert by expert, in float64."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for token, x_D in enumerate(x_TD.double()):
        chosen = zip(routes.expert_TK[token].tolist(), routes.share_TK[token].tolist(), strict=True)
        for expert, share in chosen:
            z = up.weight_XOI[expert].double() @ x_D
            u, g = z[: len(z) // 2], z[len(z) // 2 :]
            inner = 0.5 * u * (1 + torch.erf(u / math.sqrt(2))) * (g + 1)
            out_TD[token] += share * (down.weight_XOI[expert].double() @ inner)
    return out_TD
