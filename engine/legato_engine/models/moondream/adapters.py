"""Adapter files to the weights of text MLPs and experts, strictly: all is used, or refused.

Two formats, told apart by their first bytes. Shapes for rank r, text width D and inner width F; of
experts X of them, K for a token, inner width I, and q = r / K of the rank for each:

- safetensors: for each layer i that is changed, all four of `text.blocks.i.mlp.fc1.lora_a` [r, D],
  `.fc1.lora_b` [F, r], `.fc2.lora_a` [r, F] and `.fc2.lora_b` [D, r]; where the layer has experts,
  [X, q, D], [X, 2 I, q], [X, q, I] and [X, D, q]. Its metadata may name the `model` that it is for.
- the published checkpoints of fine-tunes, a torch dict whose `lora_state_dict` has the same four as
  `dense.i.up_a`, `.up_b`, `.down_a` and `.down_b` behind any prefix, or as `moe.i`, where i counts
  the layers with experts.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Mapping

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from legato_engine.errors import AdapterUnusable
from legato_engine.layers.lora import AdapterWeights, BankSizes, ExpertBankSizes, MlpWeights
from legato_engine.models.moondream.config import MoondreamConfig, TextConfig

_PARTS = ("fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")
_PUBLISHED = dict(zip(("up_a", "up_b", "down_a", "down_b"), _PARTS, strict=True))
_OWN_NAME = re.compile(r"text\.blocks\.(\d{1,4})\.mlp\.(fc[12]\.lora_[ab])")
_PUBLISHED_NAME = re.compile(r"(?:.*\.)?(dense|moe)\.(\d{1,4})\.(up_a|up_b|down_a|down_b)")
_ZIP = b"PK"

_Place = tuple[int, str]  # layer, and one of `_PARTS`


def bank_sizes(text: TextConfig) -> BankSizes:
    """What adapters change of this decoder."""
    if text.moe is None:
        return BankSizes(text.num_layers, text.dim, text.ff_dim)
    moe = text.moe
    experts = ExpertBankSizes(
        text.num_layers - moe.first_layer, moe.num_experts, moe.num_active, moe.inner_dim
    )
    return BankSizes(moe.first_layer, text.dim, text.ff_dim, experts)


def parse_adapter(
    data: bytes, config: MoondreamConfig, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """The weights of a file, rank before width; layers that it leaves out are zero.

    Raises `AdapterUnusable` saying what is wrong, `limit` and `actual` for a rank too large.
    """
    sizes = bank_sizes(config.text)
    if data.startswith(_ZIP):
        found = _read_published(data)
        tensors = _by_place(found, lambda name: _published_place(name, sizes))
    else:
        tensors = _by_place(_read_own(data, config.name), _own_place)
    rank = _rank(tensors, sizes, max_rank)
    _check(tensors, sizes, rank)
    return _stacked(tensors, sizes, rank, dtype)


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


def _published_place(name: str, sizes: BankSizes) -> _Place:
    match = _PUBLISHED_NAME.fullmatch(name)
    if match is None:
        raise AdapterUnusable(f"{name}: not a tensor of an adapter of text MLPs")
    kind, index, part = match[1], int(match[2]), _PUBLISHED[match[3]]
    if kind == "dense":
        if index >= sizes.num_layers:
            raise AdapterUnusable(f"{name}: this model has {sizes.num_layers} layers with an MLP")
        return index, part
    if sizes.experts is None:
        raise AdapterUnusable(f"{name}: it adapts experts, and this model has none")
    if index >= sizes.experts.num_layers:
        raise AdapterUnusable(f"{name}: this model has {sizes.experts.num_layers} with experts")
    return sizes.num_layers + index, part


def _rank(tensors: Mapping[_Place, torch.Tensor], sizes: BankSizes, max_rank: int) -> int:
    """By the first A of an MLP, or else of experts; that all agree is for `_check` to see."""
    place = next((place for place in sorted(tensors) if place[1].endswith("a")), None)
    shared = place is not None and place[0] >= sizes.num_layers and sizes.experts is not None
    if place is None or tensors[place].dim() != (3 if shared else 2):
        raise AdapterUnusable("no lora_a or up_a of the right number of dimensions tells its rank")
    num_active = sizes.experts.num_active if sizes.experts is not None else 1
    rank = tensors[place].shape[-2] * (num_active if shared else 1)
    if not 1 <= rank <= max_rank:
        raise AdapterUnusable(
            f"its rank is {rank}, this server takes 1 to {max_rank}", limit=max_rank, actual=rank
        )
    if rank % num_active:
        raise AdapterUnusable(
            f"its rank is {rank}, no multiple of the {num_active} experts that share it"
        )
    return rank


def _check(tensors: Mapping[_Place, torch.Tensor], sizes: BankSizes, rank: int) -> None:
    num_layers = sizes.num_layers + (sizes.experts.num_layers if sizes.experts is not None else 0)
    for (layer, part), tensor in sorted(tensors.items(), key=lambda item: item[0]):
        name = f"layer {layer} {part}"
        if layer >= num_layers:
            raise AdapterUnusable(f"{name}: this model has {num_layers} layers")
        expected = _shape(layer, part, sizes, rank)
        if tuple(tensor.shape) != expected:
            shapes = f"shape {list(tensor.shape)}, expected {list(expected)}"
            raise AdapterUnusable(f"{name}: {shapes} for rank {rank} and this model")
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            raise AdapterUnusable(f"{name}: {tensor.dtype} is not a dense floating-point tensor")
    for layer in sorted({layer for layer, _ in tensors}):
        missing = [part for part in _PARTS if (layer, part) not in tensors]
        if missing:
            raise AdapterUnusable(f"layer {layer}: {', '.join(missing)} missing")


def _shape(layer: int, part: str, sizes: BankSizes, rank: int) -> tuple[int, ...]:
    *leading, own, width = _room(part, sizes, rank, routed=layer >= sizes.num_layers)
    return (*leading, own, width) if part.endswith("a") else (*leading, width, own)


def _room(part: str, sizes: BankSizes, rank: int, *, routed: bool) -> tuple[int, ...]:
    """A layer's tensor as slots have it, the rank before the width; `routed` of experts."""
    index, experts = _PARTS.index(part), sizes.experts
    if experts is None or not routed:
        return rank, sizes.widths()[index]
    return experts.num_experts, experts.rank(rank), sizes.expert_widths()[index]


def _stacked(
    tensors: Mapping[_Place, torch.Tensor], sizes: BankSizes, rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """All layers of a kind in one tensor a part: a part of the rank is one piece then."""

    def stacked(layers: range, *, routed: bool) -> MlpWeights:
        stacks = []
        for part in _PARTS:
            room = _room(part, sizes, rank, routed=routed)
            stack_LRW = torch.zeros(len(layers), *room, dtype=dtype)
            for place, layer in enumerate(layers):
                tensor = tensors.get((layer, part))
                if tensor is not None:
                    stack_LRW[place] = tensor if part.endswith("a") else tensor.transpose(-2, -1)
            if not torch.isfinite(stack_LRW).all():
                raise AdapterUnusable(f"{part}: not finite in {dtype}")
            stacks.append(stack_LRW)
        return MlpWeights(*stacks)

    mlps, experts = stacked(range(sizes.num_layers), routed=False), sizes.experts
    if experts is None:
        return AdapterWeights(mlps)
    behind = range(sizes.num_layers, sizes.num_layers + experts.num_layers)
    return AdapterWeights(mlps, stacked(behind, routed=True))
