"""The tensors of a GGUF file by their names, shapes and order in a Hugging Face checkpoint."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
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


def read(path: Path, name: str) -> torch.Tensor:
    """A tensor by its name in a checkpoint, float32."""
    file = read_gguf(path)
    stored = next(stored for stored in file.tensors if checkpoint_name(stored) == name)
    return torch.from_numpy(_ordered(file, stored, file.read(stored)))


@functools.cache
def checkpoint_name(stored: str) -> str:
    base, _, kind = stored.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    layer = _LAYER.fullmatch(base)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    return stored


def _ordered(
    file: GgufFile, stored: str, values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Undo the order of Llama's queries and keys.

    A Llama's GGUF has the two dims of a rotated pair side by side, a checkpoint half a head apart.
    """
    part = stored.split(".")[-2]
    if file.architecture != "llama" or part not in _HEADS:
        return values
    heads = file.size(_HEADS[part], file.size("attention.head_count"))
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
