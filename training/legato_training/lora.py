"""Low-rank adapters of the text MLPs, as Legato serves them: ``out + B(A x)``, no further factor.

R rank, I and O a layer's inputs and outputs.
"""

import math
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from legato_training.model import LegatoTiny, TextBlock


class LoraLinear(nn.Module):
    """A frozen layer and its trained change, which is nothing at the start."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a_RI = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.b_OR = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., O] of [..., I]."""
        out: Tensor = self.frozen(x) + (x @ self.a_RI.t()) @ self.b_OR.t()
        return out


def add_adapter(model: LegatoTiny, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give every text MLP an adapter, and return what is to be trained."""
    model.requires_grad_(False)
    for block in model.text.blocks:
        mlp = cast(TextBlock, block).mlp
        for name, layer in (("fc1", mlp.fc1), ("fc2", mlp.fc2)):
            mlp.add_module(name, LoraLinear(layer, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save_adapter(model: LegatoTiny, path: Path) -> None:
    """Write the file as the engine's `models/moondream/adapters.py` describes it, in bf16."""
    tensors = {}
    for index, block in enumerate(model.text.blocks):
        for name in ("fc1", "fc2"):
            layer = cast(TextBlock, block).mlp.get_submodule(name)
            assert isinstance(layer, LoraLinear)  # of `add_adapter`
            prefix = f"text.blocks.{index}.mlp.{name}"
            tensors[f"{prefix}.lora_a"] = layer.a_RI.detach().bfloat16().contiguous()
            tensors[f"{prefix}.lora_b"] = layer.b_OR.detach().bfloat16().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"model": "legato-tiny"})
