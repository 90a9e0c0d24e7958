"""The byte floor of a decode step: the bytes that it must read over the bandwidth.

Shape legend: L layers, B tokens, K experts that a token chose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from legato_engine.models.moondream.config import MoondreamConfig

BANDWIDTH = 4.68e12  # bytes a second that one H200 reads at most


def context_bytes(config: MoondreamConfig, rows: int, position: int, kv_bytes: int = 2) -> int:
    """Count the bytes of keys and values that a step must read; elements have `kv_bytes`."""
    text = config.text
    return text.num_layers * 2 * text.dim * position * rows * kv_bytes


def floor_ms(
    config: MoondreamConfig, cached: int, touched: Sequence[int], expert_bytes: int
) -> float:
    """Return the milliseconds to read weights, and `cached` bytes of keys and values.

    `touched` experts, by layer, have weights of `expert_bytes` an element.
    """
    text, values = config.text, 0
    for layer in range(text.num_layers):
        values += 4 * text.dim**2
        if text.tau is not None:
            values += 6 * text.num_heads * text.dim
        if text.moe is None or layer < text.moe.first_layer:
            values += 2 * text.dim * text.ff_dim
        else:
            values += text.moe.num_experts * text.dim
            experts = touched[layer] * 3 * text.dim * text.moe.inner_dim
            values += experts * expert_bytes // 2
    weights = (values + text.vocab_size * text.dim) * 2
    return (weights + cached) / BANDWIDTH * 1e3


def experts_touched(config: MoondreamConfig, expert_LBK: torch.Tensor | None) -> list[int]:
    """Count the experts that a step's tokens chose, by layer; 0 for layers without experts."""
    text = config.text
    if expert_LBK is None or text.moe is None:
        return [0] * text.num_layers
    first = text.moe.first_layer
    return [0] * first + [len(layer.unique()) for layer in expert_LBK[first:]]
