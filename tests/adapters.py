"""Random adapters of text MLPs and experts, and the two kinds of files that hold them."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from legato_engine.models.moondream.config import TextConfig
from safetensors.torch import save

PARTS = ("fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")
PUBLISHED = dict(zip(PARTS, ("up_a", "up_b", "down_a", "down_b"), strict=True))

Tensors = dict[tuple[int, str], torch.Tensor]  # by layer and part


def random_adapter(text: TextConfig, rank: int, seed: int = 0, scale: float = 1.0) -> Tensors:
    """Changes as large as `scale` of the weights of a random model."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors: Tensors = {}
    for layer in range(text.num_layers):
        own, leading = rank, tuple[int, ...]()
        maps = ((text.dim, text.ff_dim), (text.ff_dim, text.dim))
        moe = text.moe
        if moe is not None and layer >= moe.first_layer:
            own, leading = rank // moe.num_active, (moe.num_experts,)
            maps = (text.dim, 2 * moe.inner_dim), (moe.inner_dim, text.dim)
        for name, (inputs, outputs) in zip(("fc1", "fc2"), maps, strict=True):
            tensors[layer, f"{name}.lora_a"] = noise(*leading, own, inputs) / inputs**0.5
            tensors[layer, f"{name}.lora_b"] = noise(*leading, outputs, own) * scale / own**0.5
    return tensors


def own_names(tensors: Tensors) -> dict[str, torch.Tensor]:
    """By the names of our safetensors files."""
    return {f"text.blocks.{i}.mlp.{part}": each for (i, part), each in tensors.items()}


def safetensors_file(
    tensors: Tensors | Mapping[str, torch.Tensor], model: str | None = None
) -> bytes:
    """An adapter as safetensors; `model` is what its metadata says, if anything."""
    named = {
        name if isinstance(name, str) else next(iter(own_names({name: each}))): each.contiguous()
        for name, each in tensors.items()
    }
    return save(named, None if model is None else {"model": model})


def published_file(
    tensors: Mapping[tuple[int, str], torch.Tensor],
    prefix: str = "text_model.lora.",
    text: TextConfig | None = None,
) -> bytes:
    """An adapter as fine-tunes are published; `text` says which layers have experts, if any."""
    moe = text.moe if text is not None else None

    def place(layer: int) -> str:
        is_dense = moe is None or layer < moe.first_layer
        return f"dense.{layer}" if is_dense or moe is None else f"moe.{layer - moe.first_layer}"

    named = {f"{prefix}{place(i)}.{PUBLISHED[part]}": each for (i, part), each in tensors.items()}
    return torch_file({"lora_state_dict": named})


def torch_file(content: object) -> bytes:
    """Anything that torch saves."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
