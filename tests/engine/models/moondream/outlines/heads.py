"""Heads for tests: random ones, and one trained in seconds to find what is bright."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.refiner import MaskHead
from legato_engine.models.moondream.vision import Vision, normalised, patches

from tests.shared import made_once

DIM = 32
NUM_MASKS = 4
_STEPS = 60
_BATCH = 8
_RATE = 5e-3
DARK, BRIGHT = 40, 220


def random_head(config: MoondreamConfig, seed: int = 0, *, dim: int = DIM) -> MaskHead:
    """A random head for this configuration's vision encoder."""
    torch.manual_seed(seed)
    head = MaskHead(config.vision.dim, config.vision.grid, dim, NUM_MASKS)
    for name, parameter in head.named_parameters():
        if name.endswith("in_proj_weight"):
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
        elif name.endswith(("tokens", "token", "_pe")):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("in_proj_bias"):
            torch.nn.init.zeros_(parameter)
    return head.eval().requires_grad_(requires_grad=False)


def write_learnt_head(path: Path, name: str, config: MoondreamConfig, vision: Vision) -> None:
    """Write a head that turns a box around something bright into its mask.

    The name stands for the configuration and the encoder.
    """

    def make(part: Path) -> None:
        torch.save({"head": _learnt_head(config, vision).state_dict()}, part)

    shutil.copyfile(made_once(f"{name}-head.pt", make), path)


def _learnt_head(config: MoondreamConfig, vision: Vision) -> MaskHead:
    head = random_head(config).requires_grad_()
    settings, side = config.refiner, config.vision.crop_size
    assert settings is not None
    adam = torch.optim.Adam(head.parameters(), lr=_RATE)
    random = np.random.default_rng(0)
    with torch.inference_mode(mode=False):
        for step in range(_STEPS):
            for group in adam.param_groups:
                group["lr"] = _RATE * min(1, step / 20) * (1 - step / _STEPS)
            scenes = [_scene(random, side) for _ in range(_BATCH)]
            pixels, coarse, truth = (
                torch.from_numpy(np.stack(part)) for part in zip(*scenes, strict=True)
            )
            with torch.no_grad():
                fed = patches(normalised(pixels, torch.float32), config.vision.patch_size)
                early, late = vision.encode_tapped(fed, settings.early_block)
            mask = coarse.float()
            loss = torch.zeros(())
            for _ in range(2):
                logits, _ = head(head.fused(late, early), mask)
                wanted = truth.float()[:, None].expand_as(logits)
                loss = loss + F.binary_cross_entropy_with_logits(logits, wanted)
                mask = logits[:, 0].detach().sigmoid()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return head.requires_grad_(requires_grad=False)


def _scene(random: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, the mask of a box, and the mask of the bright ellipse or bar in it."""
    centre = random.uniform(0.42, 0.58, 2)
    extent = random.uniform(0.24, 0.36, 2)
    y, x = (np.mgrid[:side, :side] + 0.5) / side
    u, v = (x - centre[0]) / extent[0], (y - centre[1]) / extent[1]
    box = np.maximum(abs(u), abs(v)) < 1
    truth = u * u + v * v < 1 if random.random() < 0.7 else abs(u) + abs(v) < 1
    noise = random.normal(0, 8, (side, side, 3))
    pixels = np.where(truth[..., None], BRIGHT, DARK) + noise
    return pixels.clip(0, 255).astype(np.uint8), box, truth
