"""Moondream's weights, from checkpoints or random."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from legato_engine.errors import InvalidField
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint_files import Header, headers, require_layers
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
    kv_dtype: str = "auto",
    memory: int | None = None,
    progress: checkpoint.Progress = lambda fraction: None,
) -> Network:
    """Load a file or folder in either published layout; experts stay in e4m3 if stored so.

    Raises:
        InvalidField: as `checkpoint.load`, or scales are missing or invalid.
    """
    stored = headers(path)
    require_layers(config.text.num_layers + config.vision.num_layers, path)
    network = _empty(config, dtype)
    if layouts.has_fp8_experts(stored):
        network.text.use_fp8_experts()
    kv_scales = _uses_kv_scales(stored, config.text.num_layers, kv_dtype)
    if kv_scales:
        network.text.use_fp8_kv()
    rename = layouts.rename(config.text.num_heads, kv_scales=kv_scales)
    checkpoint.load(network, stored, rename, device, memory=memory, progress=progress)
    _check_kv_scales(network)
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
    network = _empty(config, dtype)
    checkpoint.randomise(network, seed, device, _scale, _GAINS, memory=memory, progress=progress)
    return network.eval()


def _uses_kv_scales(stored: Sequence[Header], num_layers: int, kv_dtype: str) -> bool:
    if kv_dtype == "model":
        return False
    missing = layouts.missing_kv_scales(stored, num_layers)
    if not missing:
        return True
    if len(missing) == 2 * num_layers:
        if kv_dtype == "auto":
            return False
        problem = "kv_dtype fp8 needs scales of keys and values, and the checkpoint has none"
    else:
        problem = f"the checkpoint has only some of the {2 * num_layers} scales of keys and values"
    raise InvalidField(
        f"{problem}: {missing[0]} is missing; kv_dtype model does without", field="kv_dtype"
    )


def _check_kv_scales(network: Network) -> None:
    scale_L2 = network.text.kv_scales()
    if scale_L2 is None:
        return
    for layer, scales in enumerate(scale_L2.tolist()):
        for kind, scale in zip("kv", scales, strict=True):
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidField(
                    f"text.blocks.{layer}.attn.{kind}_scale: {scale} is no scale of fp8 values",
                    field="weights",
                )


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
