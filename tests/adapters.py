"""Random adapters of text MLPs, and the two kinds of files that hold them."""

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
        for name, inputs, outputs in (
            ("fc1", text.dim, text.ff_dim),
            ("fc2", text.ff_dim, text.dim),
        ):
            tensors[layer, f"{name}.lora_a"] = noise(rank, inputs) / inputs**0.5
            tensors[layer, f"{name}.lora_b"] = noise(outputs, rank) * scale / rank**0.5
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
    tensors: Mapping[tuple[int, str], torch.Tensor], prefix: str = "text_model.lora."
) -> bytes:
    """An adapter as fine-tunes are published."""
    return torch_file(
        {
            "lora_state_dict": {
                f"{prefix}dense.{i}.{PUBLISHED[part]}": each for (i, part), each in tensors.items()
            }
        }
    )


def torch_file(content: object) -> bytes:
    """Anything that torch saves."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
