"""Random adapters and the files that hold them: of Moondream, and of PEFT."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from legato_engine.models.adapters import PeftTargets
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


# ---------------------------------------------------------------- peft

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """A random adapter of some of a model's linear layers, by their names there."""

    settings: dict[str, Any]
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(
        cls,
        theirs: Any,
        targets: Sequence[str] = ALL,
        rank: int = 4,
        seed: int = 0,
        **settings: Any,
    ) -> PeftAdapter:
        """Changes about half as large as the weights of one of transformers' models.

        In its place there may be the shapes of its layers by name.
        """
        generator = torch.Generator().manual_seed(seed)
        said: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        said |= {"bias": "none", "target_modules": list(targets)} | settings
        pairs, shapes = {}, theirs
        if not isinstance(theirs, dict):
            modules = theirs.named_modules()
            shapes = {name: each.weight.shape for name, each in modules if hasattr(each, "weight")}
        for name, (*outer, inputs) in shapes.items():
            own = name.rpartition(".")[2]
            if own in targets and ".visual." not in f".{name}.":
                ranks = said.get("rank_pattern", {})
                rank = next((ranks[end] for end in ranks if name.endswith(end)), said["r"])
                (outputs,) = outer
                a_RI = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                pairs[name] = a_RI, torch.randn(outputs, rank, generator=generator) / 4
        return cls(said, pairs)

    @classmethod
    def fitting(cls, targets: PeftTargets, rank: int) -> PeftAdapter:
        """Changes of all maps of one of our models."""
        maps = targets.sizes.maps
        shapes = {name: maps[part][::-1] for name, (_, part) in targets.modules.items()}
        return cls.of(shapes, targets.names, rank=rank)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of adapter_model.safetensors."""
        return {
            f"base_model.model.{name}.lora_{side}.weight": tensor
            for name, pair in self.pairs.items()
            for side, tensor in zip("AB", pair, strict=True)
        }

    def files(self) -> tuple[bytes, bytes]:
        """Tensors and settings."""
        return save(self.tensors()), json.dumps(self.settings).encode()

    def write(self, folder: Path) -> None:
        """Write both files."""
        folder.mkdir()
        data, settings = self.files()
        (folder / "adapter_model.safetensors").write_bytes(data)
        (folder / "adapter_config.json").write_bytes(settings)

    def merged(self, theirs: Any) -> Any:
        """A copy of transformers' model with the adapter in its weights."""
        model = copy.deepcopy(theirs)
        alphas = self.settings.get("alpha_pattern", {})
        with torch.no_grad():
            for name, (a_RI, b_OR) in self.pairs.items():
                own = next((alphas[end] for end in alphas if name.endswith(end)), None)
                alpha, rank = self.settings["lora_alpha"] if own is None else own, len(a_RI)
                divisor = math.sqrt(rank) if self.settings.get("use_rslora") else rank
                model.get_submodule(name).weight += alpha / divisor * b_OR @ a_RI
        return model
