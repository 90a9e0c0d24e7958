"""Adapter files to the weights of text MLPs, strictly: what a file holds is used or refused.

Two formats, told apart by their first bytes. Shapes for rank r, text width D and inner width F:

- safetensors: for each layer i that is changed, all four of `text.blocks.i.mlp.fc1.lora_a` [r, D],
  `.fc1.lora_b` [F, r], `.fc2.lora_a` [r, F] and `.fc2.lora_b` [D, r]. Its metadata may name the
  `model` that it is for.
- the published checkpoints of fine-tunes, a torch dict whose `lora_state_dict` has the same four as
  `dense.i.up_a`, `.up_b`, `.down_a` and `.down_b` behind any prefix. `moe.i` are experts' layers.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from legato_engine.errors import AdapterUnusable
from legato_engine.layers.lora import MlpWeights
from legato_engine.models.moondream.config import MoondreamConfig, TextConfig

_PARTS = ("fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")
_PUBLISHED = dict(zip(("up_a", "up_b", "down_a", "down_b"), _PARTS, strict=True))
_OWN_NAME = re.compile(r"text\.blocks\.(\d{1,4})\.mlp\.(fc[12]\.lora_[ab])")
_PUBLISHED_NAME = re.compile(r"(?:.*\.)?(dense|moe)\.(\d{1,4})\.(up_a|up_b|down_a|down_b)")
_ZIP = b"PK"

_Place = tuple[int, str]  # layer, and one of `_PARTS`


def parse_adapter(
    data: bytes, config: MoondreamConfig, max_rank: int, dtype: torch.dtype
) -> MlpWeights:
    """The weights [layers, rank, width] of a file; layers that it leaves out are zero.

    Raises `AdapterUnusable` saying what is wrong, `limit` and `actual` for a rank too large.
    """
    if data.startswith(_ZIP):
        tensors = _by_place(_read_published(data), _published_place)
    else:
        tensors = _by_place(_read_own(data, config.name), _own_place)
    rank = _rank(tensors, max_rank)
    _check(tensors, config.text, rank)
    return _stacked(tensors, config.text, rank, dtype)


def _read_own(data: bytes, model: str) -> Mapping[str, torch.Tensor]:
    try:
        tensors = safetensors.load(data)
        length = int.from_bytes(data[:8], "little")
        named = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("model", model)
    except (SafetensorError, ValueError) as error:
        raise AdapterUnusable(f"neither safetensors nor a torch checkpoint: {error}") from None
    if named != model:
        raise AdapterUnusable(f"it is for the model {named}, not {model}")
    return tensors


def _read_published(data: bytes) -> Mapping[str, torch.Tensor]:
    try:
        # Without `weights_only` a file could run code.
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError, KeyError) as error:
        raise AdapterUnusable(f"the torch checkpoint cannot be read: {_line(error)}") from None
    found = content.get("lora_state_dict") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise AdapterUnusable("the torch checkpoint has no lora_state_dict")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise AdapterUnusable(f"{name}: lora_state_dict holds named tensors only")
    return {name: tensor.detach() for name, tensor in found.items()}


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _by_place(
    tensors: Mapping[str, torch.Tensor], place_of: Callable[[str], _Place]
) -> dict[_Place, torch.Tensor]:
    placed: dict[_Place, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = place_of(name)
        if place in placed:
            raise AdapterUnusable(f"{name}: given twice")
        placed[place] = tensor
    if not placed:
        raise AdapterUnusable("it holds no tensors")
    return placed


def _own_place(name: str) -> _Place:
    match = _OWN_NAME.fullmatch(name)
    if match is None:
        raise AdapterUnusable(f"{name}: not a tensor of an adapter")
    return int(match[1]), match[2]


def _published_place(name: str) -> _Place:
    match = _PUBLISHED_NAME.fullmatch(name)
    if match is None:
        raise AdapterUnusable(f"{name}: not a tensor of an adapter of text MLPs")
    if match[1] == "moe":
        raise AdapterUnusable(f"{name}: it adapts experts, and this model has none")
    return int(match[2]), _PUBLISHED[match[3]]


def _rank(tensors: Mapping[_Place, torch.Tensor], max_rank: int) -> int:
    """The first dimension of any A; that all agree is for `_check` to see."""
    place = next((place for place in sorted(tensors) if place[1].endswith("a")), None)
    if place is None or tensors[place].dim() != 2:
        raise AdapterUnusable("no lora_a or up_a of two dimensions tells its rank")
    rank = tensors[place].shape[0]
    if not 1 <= rank <= max_rank:
        raise AdapterUnusable(
            f"its rank is {rank}, this server takes 1 to {max_rank}", limit=max_rank, actual=rank
        )
    return rank


def _check(tensors: Mapping[_Place, torch.Tensor], text: TextConfig, rank: int) -> None:
    for (layer, part), tensor in sorted(tensors.items(), key=lambda item: item[0]):
        name = f"layer {layer} {part}"
        if layer >= text.num_layers:
            raise AdapterUnusable(f"{name}: this model has {text.num_layers} layers")
        expected = _shape(part, text, rank)
        if tuple(tensor.shape) != expected:
            shapes = f"shape {list(tensor.shape)}, expected {list(expected)}"
            raise AdapterUnusable(f"{name}: {shapes} for rank {rank} and this model")
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            raise AdapterUnusable(f"{name}: {tensor.dtype} is not a dense floating-point tensor")
    for layer in sorted({layer for layer, _ in tensors}):
        missing = [part for part in _PARTS if (layer, part) not in tensors]
        if missing:
            raise AdapterUnusable(f"layer {layer}: {', '.join(missing)} missing")


def _shape(part: str, text: TextConfig, rank: int) -> tuple[int, int]:
    width = text.dim if part in ("fc1.lora_a", "fc2.lora_b") else text.ff_dim
    return (rank, width) if part.endswith("a") else (width, rank)


def _stacked(
    tensors: Mapping[_Place, torch.Tensor], text: TextConfig, rank: int, dtype: torch.dtype
) -> MlpWeights:
    """All layers in one tensor a part, the rank first: a part of the rank is one piece then."""
    stacks = []
    for part in _PARTS:
        width = max(_shape(part, text, 0))
        stack_LRW = torch.zeros(text.num_layers, rank, width, dtype=dtype)
        for layer in _layers_of(tensors):
            tensor = tensors[layer, part]
            stack_LRW[layer] = tensor if part.endswith("a") else tensor.t()
        if not torch.isfinite(stack_LRW).all():
            raise AdapterUnusable(f"{part}: not finite in {dtype}")
        stacks.append(stack_LRW)
    return MlpWeights(*stacks)


def _layers_of(tensors: Iterable[_Place]) -> set[int]:
    return {layer for layer, _ in tensors}
