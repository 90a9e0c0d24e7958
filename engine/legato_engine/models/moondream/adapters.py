"""Adapter files to the weights of text MLPs and experts; every tensor must be used.

Files are safetensors, or published fine-tunes (torch dicts with a `lora_state_dict`), which a
confined process turns into safetensors; docs/adapters.md has names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from safetensors import torch as safetensors

from legato_engine.errors import AdapterUnusable
from legato_engine.kernels.parameters import LowRankStack
from legato_engine.layers.lora import AdapterWeights, BankSizes, ExpertBankSizes, Widths
from legato_engine.models.adapters import is_dense, read_safetensors, stacked
from legato_engine.models.moondream.config import MoondreamConfig, TextConfig
from legato_engine.models.untrusted import FileRefused, tensors_of_pickle

_MAPS, _SIDES = ("fc1", "fc2"), ("lora_a", "lora_b")
_PARTS = tuple(f"{name}.{side}" for name in _MAPS for side in _SIDES)
_PUBLISHED = dict(zip(("up_a", "up_b", "down_a", "down_b"), _PARTS, strict=True))
_OWN_NAME = re.compile(r"text\.blocks\.(\d{1,4})\.mlp\.(fc[12]\.lora_[ab])")
_PUBLISHED_NAME = re.compile(r"(?:.*\.)?(dense|moe)\.(\d{1,4})\.(up_a|up_b|down_a|down_b)")
_ZIP = b"PK"

_Key = tuple[int, str]  # layer, and one of `_PARTS`


def bank_sizes(text: TextConfig) -> BankSizes:
    maps = {"fc1": (text.dim, text.ff_dim), "fc2": (text.ff_dim, text.dim)}
    if text.moe is None:
        return BankSizes(text.num_layers, maps)
    moe = text.moe
    own = {"fc1": (text.dim, 2 * moe.inner_dim), "fc2": (moe.inner_dim, text.dim)}
    experts = ExpertBankSizes(
        text.num_layers - moe.first_layer, moe.num_experts, moe.num_active, own
    )
    return BankSizes(moe.first_layer, maps, experts)


def parse_adapter(
    data: bytes, config: MoondreamConfig, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Parse a file; layers that it omits are zero.

    Raises:
        AdapterUnusable: the file is broken or does not fit; `limit` and `actual` are of the rank.
    """
    sizes = bank_sizes(config.text)
    if data.startswith(_ZIP):
        found = _read_published(data)
        tensors = _by_key(found, lambda name: _published_key(name, sizes))
    else:
        tensors = _by_key(_read_own(data, config.name), _own_key)
    rank = _rank(tensors, sizes, max_rank)
    _check(tensors, sizes, rank)
    return _stacked(tensors, sizes, rank, dtype)


def _read_own(data: bytes, model: str) -> Mapping[str, torch.Tensor]:
    tensors, metadata = read_safetensors(data, "neither safetensors nor a torch checkpoint")
    named = metadata.get("model", model)
    if named != model:
        raise AdapterUnusable(f"it is for the model {named}, not {model}")
    return tensors


def _read_published(data: bytes) -> Mapping[str, torch.Tensor]:
    try:
        return safetensors.load(tensors_of_pickle(data))
    except FileRefused as error:
        raise AdapterUnusable(f"the torch checkpoint {error}") from None


def _by_key(
    tensors: Mapping[str, torch.Tensor], key_of: Callable[[str], _Key]
) -> dict[_Key, torch.Tensor]:
    by_key: dict[_Key, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key = key_of(name)
        if key in by_key:
            raise AdapterUnusable(f"{name}: given twice")
        by_key[key] = tensor
    if not by_key:
        raise AdapterUnusable("it holds no tensors")
    return by_key


def _own_key(name: str) -> _Key:
    match = _OWN_NAME.fullmatch(name)
    if match is None:
        raise AdapterUnusable(f"{name}: not a tensor of an adapter")
    return int(match[1]), match[2]


def _published_key(name: str, sizes: BankSizes) -> _Key:
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


def _rank(tensors: Mapping[_Key, torch.Tensor], sizes: BankSizes, max_rank: int) -> int:
    """Read the rank of the first A; `_check` compares the others."""
    key = next((key for key in sorted(tensors) if key[1].endswith("a")), None)
    shared = key is not None and key[0] >= sizes.num_layers and sizes.experts is not None
    if key is None or tensors[key].dim() != (3 if shared else 2):
        raise AdapterUnusable("no lora_a or up_a of the right number of dimensions tells its rank")
    num_active = sizes.experts.num_active if sizes.experts is not None else 1
    rank = tensors[key].shape[-2] * (num_active if shared else 1)
    if not 1 <= rank <= max_rank:
        raise AdapterUnusable(
            f"its rank is {rank}, this server takes 1 to {max_rank}", limit=max_rank, actual=rank
        )
    if rank % num_active:
        raise AdapterUnusable(
            f"its rank is {rank}, no multiple of the {num_active} experts that share it"
        )
    return rank


def _check(tensors: Mapping[_Key, torch.Tensor], sizes: BankSizes, rank: int) -> None:
    num_layers = sizes.num_layers + (sizes.experts.num_layers if sizes.experts is not None else 0)
    for (layer, part), tensor in sorted(tensors.items(), key=lambda item: item[0]):
        name = f"layer {layer} {part}"
        if layer >= num_layers:
            raise AdapterUnusable(f"{name}: this model has {num_layers} layers")
        expected = _shape(layer, part, sizes, rank)
        if tuple(tensor.shape) != expected:
            shapes = f"shape {list(tensor.shape)}, expected {list(expected)}"
            raise AdapterUnusable(f"{name}: {shapes} for rank {rank} and this model")
        if not is_dense(tensor):
            raise AdapterUnusable(f"{name}: {tensor.dtype} is not a dense floating-point tensor")
    for layer in sorted({layer for layer, _ in tensors}):
        missing = [part for part in _PARTS if (layer, part) not in tensors]
        if missing:
            raise AdapterUnusable(f"layer {layer}: {', '.join(missing)} missing")


def _shape(layer: int, part: str, sizes: BankSizes, rank: int) -> tuple[int, ...]:
    part, _, side = part.partition(".")
    shape, (inputs, outputs) = _slots(part, sizes, rank, routed=layer >= sizes.num_layers)
    *leading, own = shape
    return (*leading, own, inputs) if side == _SIDES[0] else (*leading, outputs, own)


def _slots(
    name: str, sizes: BankSizes, rank: int, *, routed: bool
) -> tuple[tuple[int, ...], Widths]:
    """Return the number of experts, if there are some, and the rank of one; and a map's widths."""
    experts = sizes.experts
    if experts is None or not routed:
        return (rank,), sizes.maps[name]
    return (experts.num_experts, experts.rank(rank)), experts.maps[name]


def _stacked(
    tensors: Mapping[_Key, torch.Tensor], sizes: BankSizes, rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Stack the layers of each map; a slice of the rank is contiguous."""

    def maps(layers: range, *, routed: bool) -> dict[str, LowRankStack]:
        stacks = {}
        for name in _MAPS:
            shape, widths = _slots(name, sizes, rank, routed=routed)
            a, b = (torch.zeros(len(layers), *shape, width, dtype=dtype) for width in widths)
            changes = {
                index: (tensors[layer, f"{name}.lora_a"], tensors[layer, f"{name}.lora_b"])
                for index, layer in enumerate(layers)
                if (layer, f"{name}.lora_a") in tensors
            }
            stacks[name] = stacked(name, a, b, changes)
        return stacks

    dense, experts = maps(range(sizes.num_layers), routed=False), sizes.experts
    if experts is None:
        return AdapterWeights(dense)
    routed_layers = range(sizes.num_layers, sizes.num_layers + experts.num_layers)
    return AdapterWeights(dense, maps(routed_layers, routed=True))
