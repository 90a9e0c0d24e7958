"""The tensors of a GGUF file by their names, shapes and order in a Hugging Face checkpoint."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from legato_engine.models.gguf.reader import GgufFile, read_gguf
from legato_engine.models.untrusted import refusing

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
    takes_numbers = target.device.type == "cpu" and target.dtype is torch.float32
    direct = takes_numbers and target.is_contiguous()
    out = target if direct else torch.empty(target.shape)
    with refusing(f"{stored} in {path.name}", "weights"):
        _read(file, stored, out.numpy())
    if not direct:
        target.copy_(out.to(target.device))


def _read(file: GgufFile, stored: str, out: npt.NDArray[np.float32]) -> None:
    """Undo the order of Llama's queries and keys.

    A Llama's GGUF has the two dims of a rotated pair side by side, a checkpoint half a head apart.
    """
    part = stored.split(".")[-2]
    if file.architecture != "llama" or part not in _HEADS:
        file.read(stored, out)
        return
    heads = file.size(_HEADS[part], file.size("attention.head_count"))
    pairs = np.empty_like(out)
    file.read(stored, pairs)
    halves = out.reshape(heads, 2, -1, *out.shape[1:])
    halves[...] = pairs.reshape(heads, -1, 2, *out.shape[1:]).swapaxes(1, 2)


@functools.cache
def checkpoint_name(stored: str) -> str:
    base, _, kind = stored.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    layer = _LAYER.fullmatch(base)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    return stored
