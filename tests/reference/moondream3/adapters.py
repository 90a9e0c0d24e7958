"""Adapters: low-rank changes of a fine-tune, by their published names.

`dense.{i}` belong to layer i, `moe.{i}` to the i-th layer with experts; each has `up_a`, `up_b`,
`down_a` and `down_b`. The product of a map's input with `a` and `b` is added to its output,
unscaled.

Shapes: T positions, R ranks, I and O a map's inputs and outputs.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tests.reference.moondream3.config import Config, TextConfig
from tests.reference.moondream3.numerics import Array, Weights, weight

Shapes = dict[str, tuple[int, ...]]


def change(x_TI: Array, weights: Weights, name: str, expert: int | None = None) -> Array | float:
    """[T, O]: what the adapter adds to the map `name` of x; nothing if it has no such map."""
    if f"{name}_a" not in weights:
        return 0.0
    a_RI, b_OR = weight(weights, f"{name}_a"), weight(weights, f"{name}_b")
    if expert is not None:
        a_RI, b_OR = a_RI[expert], b_OR[expert]
    return (b_OR @ (a_RI @ x_TI.T)).T


def layer_name(layer: int, text: TextConfig) -> str:
    """The name of a layer's changes."""
    if layer < text.dense_layers:
        return f"dense.{layer}"
    return f"moe.{layer - text.dense_layers}"


def adapter_shapes(config: Config, rank: int) -> Shapes:
    """All tensors of an adapter; active experts share the rank."""
    text, shapes = config.text, Shapes()
    share = rank // text.experts_per_token
    for layer in range(text.layers):
        name = layer_name(layer, text)
        own, lead = rank, list[int]()
        up, down = (text.width, text.inner), (text.inner, text.width)
        if layer >= text.dense_layers:
            own, lead = share, [text.experts]
            up, down = (text.width, 2 * text.expert_inner), (text.expert_inner, text.width)
        for part, (inputs, outputs) in (("up", up), ("down", down)):
            shapes[f"{name}.{part}_a"] = (*lead, own, inputs)
            shapes[f"{name}.{part}_b"] = (*lead, outputs, own)
    return shapes


def random_adapter(config: Config, rank: int, seed: int) -> dict[str, NDArray[np.generic]]:
    """Changes about as large as what they change, in float32."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
        for name, shape in adapter_shapes(config, rank).items()
    }
