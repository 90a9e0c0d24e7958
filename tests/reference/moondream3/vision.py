"""From pixels to the embeddings that follow BOS.

Shapes: C crops, P patches of a crop, D the encoder's width, K dims of a head.
"""

import numpy as np

from tests.reference.moondream3.config import Config
from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    attend,
    gelu_tanh,
    layer_norm,
    linear,
    round_bfloat16,
    split_heads,
    weight,
)
from tests.reference.moondream3.tiling import Pixels, adaptive_pool, crops, stitch


def normalise(pixels: Pixels, config: Config) -> Array:
    """0..255 to -1..1, exactly or with a rounding after each of the three steps."""
    x = pixels.astype(np.float64)
    if config.switches.pixels == "exact":
        return (x / 255 - 0.5) / 0.5
    return round_bfloat16(round_bfloat16(round_bfloat16(x / 255) - 0.5) / 0.5)


def patchify(crop: Array, patch: int) -> Array:
    """[height, width, 3] to [P, 3 * patch * patch]: by rows; within a patch the channel, y, x."""
    rows, columns = crop.shape[0] // patch, crop.shape[1] // patch
    patches = [
        crop[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        .transpose(2, 0, 1)
        .reshape(-1)
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack(patches)


def _attention(x_PD: Array, heads: int, weights: Weights, name: str) -> Array:
    q_PD, k_PD, v_PD = np.split(linear(x_PD, weights, f"{name}.qkv"), 3, axis=-1)
    q, k, v = (split_heads(part, heads) for part in (q_PD, k_PD, v_PD))
    everything = np.ones((len(x_PD), len(x_PD)), bool)
    return linear(attend(q, k, v, everything), weights, f"{name}.proj")


def vision_block(x_PD: Array, layer: int, config: Config, weights: Weights) -> Array:
    """Attention, then the MLP on what it left, each with a norm before and a sum after it."""
    block = f"vision.blocks.{layer}"
    normed = layer_norm(x_PD, weights, f"{block}.ln1")
    x_PD = x_PD + _attention(normed, config.vision.heads, weights, f"{block}.attn")
    normed = layer_norm(x_PD, weights, f"{block}.ln2")
    hidden = gelu_tanh(linear(normed, weights, f"{block}.mlp.fc1"))
    return x_PD + linear(hidden, weights, f"{block}.mlp.fc2")


def encode_crop(crop: Pixels, config: Config, weights: Weights) -> Array:
    """uint8 [crop, crop, 3] to features [P, D]. Crops never see each other."""
    patches = patchify(normalise(crop, config), config.vision.patch)
    x_PD = linear(patches, weights, "vision.patch_emb") + weight(weights, "vision.pos_emb")[0]
    for layer in range(config.vision.layers):
        x_PD = vision_block(x_PD, layer, config, weights)
    return layer_norm(x_PD, weights, "vision.post_ln")


def project(
    features_CPD: Array, tiling: tuple[int, int], config: Config, weights: Weights
) -> Array:
    """Features of all crops, the whole image's first, to embeddings [P, width of the text]."""
    vision = config.vision
    whole_PD, tiles_CPD = features_CPD[0], features_CPD[1:]
    tiles = tiles_CPD.reshape(-1, vision.grid, vision.grid, vision.width)
    local = adaptive_pool(stitch(tiles, tiling, vision), vision.grid)
    both = np.concatenate([whole_PD, local.reshape(-1, vision.width)], axis=-1)
    hidden = gelu_tanh(linear(both, weights, "vision.proj_mlp.fc1"))
    return linear(hidden, weights, "vision.proj_mlp.fc2")


def encode_image(rgb: Pixels, config: Config, weights: Weights) -> Array:
    """uint8 [height, width, 3] to embeddings [grid * grid, width of the text model].

    Raises:
        ValueError: `rgb` is of another type or shape.
    """
    cut, tiling = crops(rgb, config.vision)
    features_CPD = np.stack([encode_crop(crop, config, weights) for crop in cut])
    return project(features_CPD, tiling, config, weights)
