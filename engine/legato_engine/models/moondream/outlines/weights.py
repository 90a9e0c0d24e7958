"""Loading of a refiner's head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from legato_engine.errors import InvalidField
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint_files import Header
from legato_engine.models.checkpoint_plan import plan
from legato_engine.models.moondream.config import VisionConfig
from legato_engine.models.moondream.outlines.head import Head
from legato_engine.models.untrusted import refusing

_KEY = "head"  # of a pickled file's dict
_PICKLED = (".pt", ".pth")
_DIM, _NUM_MASKS = 256, 4  # of a file without mask tokens
_DIM_STEP = 32


def load_head(path: Path, vision: VisionConfig, like: torch.Tensor) -> Head:
    """Load a head, on the device and in the dtype of `like`.

    The file is .safetensors, or a .pt dict of tensors, possibly as its entry `head`; it determines
    width and number of masks.
    """
    stored = _read(path)
    dim, num_masks = _sizes(path, stored)
    with torch.device("meta"):
        head = Head(vision.dim, vision.grid, dim, num_masks).to(like.dtype)
    headers = [Header(name, path, tuple(each.shape), each.dtype) for name, each in stored.items()]
    try:
        moves = plan(head, headers, lambda name: name)
    except InvalidField as error:
        raise _unusable(path, f"is no refiner for this model: {error}") from None
    for move in moves:
        tensor = stored[move.header.name].to(like.device, like.dtype, copy=True)
        checkpoint.assign(head, move.destination.name, tensor)
    return head.eval()


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    content: object
    with refusing(str(path), "refiner"):
        if path.suffix in _PICKLED:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            content = load_file(path)
    if isinstance(content, dict) and isinstance(content.get(_KEY), dict):
        content = content[_KEY]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise _unusable(path, "is no dict of tensors by name, nor has one as `head`")
    return content


def _sizes(path: Path, stored: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    tokens = stored.get("mask_tokens")
    if tokens is None or tokens.dim() != 2:
        return _DIM, _NUM_MASKS
    num_masks, dim = tokens.shape
    if dim == 0 or dim % _DIM_STEP:
        raise _unusable(path, f"has a width of {dim}, which is no multiple of {_DIM_STEP}")
    return dim, num_masks


def _unusable(path: Path, problem: str) -> InvalidField:
    return InvalidField(f"{path} {problem}", field="refiner")
