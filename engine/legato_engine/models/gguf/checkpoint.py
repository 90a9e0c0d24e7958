"""The tensors of a GGUF file by their names, shapes and order in a Hugging Face checkpoint."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

from legato_engine.models.gguf.reader import GgufFile, read_gguf

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
"""Factors of the rotation, part of the configuration rather than of the checkpoint."""

_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by their names in a checkpoint; unknown names stay."""
    return {
        checkpoint_name(name): stored.shape
        for name, stored in read_gguf(path).tensors.items()
        if name != ROPE_FACTORS
    }


def fill(path: Path, name: str, target: torch.Tensor) -> None:
    """Write a tensor by its name in a checkpoint, cast, into one of its shape."""
    file = read_gguf(path)
    stored = next(stored for stored in file.tensors if checkpoint_name(stored) == name)
    heads = _heads_in_pairs(file, stored)
    takes_numbers = target.device.type == "cpu" and target.dtype is torch.float32
    if takes_numbers and target.is_contiguous() and not heads:
        file.read(stored, target.numpy())
        return
    numbers = torch.empty(target.shape)
    file.read(stored, numbers.numpy())
    target.copy_((_halves_apart(numbers, heads) if heads else numbers).to(target.device))


@functools.cache
def checkpoint_name(stored: str) -> str:
    base, _, kind = stored.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    layer = _LAYER.fullmatch(base)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    return stored


def _heads_in_pairs(file: GgufFile, stored: str) -> int:
    """The number of heads of Llama's queries and keys, whose order is another one; 0 of others.

    A Llama's GGUF has the two dims of a rotated pair side by side, a checkpoint half a head apart.
    """
    part = stored.split(".")[-2]
    if file.architecture != "llama" or part not in _HEADS:
        return 0
    heads: int = file.size(_HEADS[part], file.size("attention.head_count"))
    return heads


def _halves_apart(numbers: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of a checkpoint."""
    return numbers.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
