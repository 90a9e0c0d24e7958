"""Random codes in every format that checkpoints have."""

from __future__ import annotations

import torch
from legato_engine.kernels.map_codes import CodeFormat, MapCodes, WeightKind

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
