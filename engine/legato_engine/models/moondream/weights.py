"""Moondream's weights: from checkpoints, or random."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from legato_engine.models import checkpoint
from legato_engine.models.checkpoint_files import headers
from legato_engine.models.moondream import layouts
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import Network

_GAINS = re.compile(r"ln\d?\.weight$")


def load_weights(
    config: MoondreamConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    memory: int | None = None,
    progress: checkpoint.Progress = lambda fraction: None,
) -> Network:
    """Read a file or folder that `checkpoint_files.headers` understands.

    In either of the published layouts; names may start with `model.` and contain `._orig_mod`.
    Experts stay in e4m3 if the file has them so. Raises `InvalidField` as `checkpoint.load` does.
    """
    network = _empty(config, dtype)
    stored = headers(path)
    if layouts.has_fp8_experts(stored):
        network.text.use_fp8_experts()
    rename = layouts.rename(config.text.num_heads)
    checkpoint.load(network, stored, rename, device, memory=memory, progress=progress)
    return network.eval()


def random_weights(
    config: MoondreamConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    memory: int | None = None,
    progress: checkpoint.Progress = lambda fraction: None,
) -> Network:
    """Seeded weights of sensible scale, made on the device (CPU and GPU seeds differ)."""
    network = _empty(config, dtype)
    checkpoint.randomise(network, seed, device, _scale, _GAINS, memory=memory, progress=progress)
    return network.eval()


def _scale(name: str, shape: torch.Size) -> float:
    if name.endswith("features") or name == "text.wte":
        return 1.0
    if name.endswith(("weight", "wqwv")) and len(shape) >= 2:
        return 1.0 / math.sqrt(shape[-1])
    if name.endswith("tau.alpha"):
        return 0.5
    return 0.02


def _empty(config: MoondreamConfig, dtype: torch.dtype) -> Network:
    with torch.device("meta"):
        return Network(config).to(dtype)
