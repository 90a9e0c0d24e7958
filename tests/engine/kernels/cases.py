"""Random codes in every format that checkpoints have."""

from __future__ import annotations

import math

import torch
from legato_engine.kernels import ops
from legato_engine.kernels.map_codes import CodeFormat, MapCodes, WeightKind
from legato_engine.kernels.parameters import ExpertWeights

FORMATS = {
    "int8, a scale a row": CodeFormat(WeightKind.INT8),
    "int4, a scale for 64": CodeFormat(WeightKind.INT4, 64, torch.bfloat16),
    "int4, a scale for 128": CodeFormat(WeightKind.INT4, 128, torch.bfloat16),
    "Q8_0": CodeFormat(WeightKind.INT8, 32, torch.float16),
    "Q4_0": CodeFormat(WeightKind.INT4, 32, torch.float16),
    "Q4_0 with large scales": CodeFormat(WeightKind.INT4, 32, torch.float16),
    "Q4_1": CodeFormat(WeightKind.INT4, 32, torch.float16, has_minima=True),
    "Q4_K": CodeFormat(WeightKind.INT4, 32, torch.float32, has_minima=True),
}
BLOCKS = tuple(name for name, each in FORMATS.items() if each.group == 32)


def random_codes(name, outputs, inputs, *, of_gpu=False, device="cpu"):
    """Any codes; scales of Q4_K have as many bits as a half times 6 bits, on a GPU rounded."""
    code_format = FORMATS[name].of_gpu if of_gpu else FORMATS[name]
    codes = code_format.empty((outputs, inputs), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    codes.codes.view(torch.uint8).random_(0, 256, generator=generator)
    factor = 7e4 / 8 if "large" in name else 0.01
    for seed, part in enumerate((codes.scales, codes.minima)):
        if part is None:
            continue
        noise = torch.randn(part.numel(), generator=torch.Generator().manual_seed(seed))
        halves = noise.mul(factor).clamp(-6e4, 6e4).half().float()
        six = torch.randint(0, 64, halves.shape, generator=generator) if name == "Q4_K" else 1
        part.copy_((halves * six).view(part.shape))
    return MapCodes(codes.kind, **{key: each.to(device) for key, each in codes.tensors().items()})


# ---------------------------------------------------------------- expert cases
# Experts and tokens for their operation, and the formula.
#
# Shape legend as in `kernels.ops`.


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
