"""The refiner's head in float64, one crop at a time, by the published tensor names.

Shape legend: C channels, Y and X rows and columns of a map, T cells or tokens, D width.
"""

from __future__ import annotations

import numpy as np

from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    gelu_erf,
    layer_norm,
    linear,
    sigmoid,
    softmax,
    weight,
)

_HEADS, _GROWN_HEADS, _BLOCKS = 8, 4, 2
_MASK_GROUPS = (1, 8, 16, 32)
_FUSED_GROUPS = 32


def refine(weights: Weights, late_TD: Array, early_TD: Array, mask_YX: Array, times: int) -> Array:
    """[Y, X] in 0..1: repeatedly the mask with the highest predicted IoU."""
    for _ in range(times):
        masks, ratings = masks_of(weights, late_TD, early_TD, mask_YX)
        mask_YX = sigmoid(masks[int(np.argmax(ratings))])
    return mask_YX


def masks_of(
    weights: Weights, late_TD: Array, early_TD: Array, mask_YX: Array
) -> tuple[Array, Array]:
    """Logits of all masks at the size of the given one, and their predicted IoU."""
    grid = weights["image_pe"].shape[-1]
    late = _conv(weights, "image_proj", _map(late_TD, grid))
    early = linear(early_TD, weights, "hq_fusion.early_proj.0")
    early = gelu_erf(layer_norm(early, weights, "hq_fusion.early_proj.1"))
    image = np.concatenate([_map(early, grid), late])
    for index, padding in ((0, 0), (3, 1)):
        image = _conv(weights, f"hq_fusion.fusion.{index}", image, padding=padding)
        name = f"hq_fusion.fusion.{index + 1}"
        image = gelu_erf(_group_norm(weights, name, image, _FUSED_GROUPS))
    hint = mask_YX[None]
    for number, groups in enumerate(_MASK_GROUPS, start=1):
        hint = _conv(weights, f"mask_encoder.conv{number}.0", hint, stride=2, padding=1)
        name = f"mask_encoder.conv{number}.1"
        hint = gelu_erf(_group_norm(weights, name, hint, min(groups, len(hint))))
    return _decode(weights, image + _resized(hint, (grid, grid)), mask_YX.shape)


def _decode(weights: Weights, image: Array, size: tuple[int, ...]) -> tuple[Array, Array]:
    places, where = _tokens(image), _tokens(weight(weights, "image_pe")[0])
    tokens = np.concatenate([weight(weights, "mask_tokens"), weight(weights, "iou_token")])
    own = weight(weights, "output_pe")
    for index in range(_BLOCKS):
        name = f"transformer_blocks.{index}."
        seen = _attend(weights, name + "output_self_attn", tokens + own, tokens + own, tokens)
        tokens = layer_norm(tokens + seen, weights, name + "norm1")
        looking = name + "cross_attn_token_to_image"
        seen = _attend(weights, looking, tokens + own, places + where, places)
        tokens = layer_norm(tokens + seen, weights, name + "norm2")
        thought = _mlp(weights, name + "mlp", tokens, 2)
        tokens = layer_norm(tokens + thought, weights, name + "norm3")
        looking = name + "cross_attn_image_to_token"
        seen = _attend(weights, looking, places + where, tokens + own, tokens)
        places = layer_norm(places + seen, weights, name + "norm4")
    seen = _attend(weights, "final_token_to_image", tokens + own, places + where, places)
    tokens = layer_norm(tokens + seen, weights, "final_norm")
    grown = _map(places, image.shape[-1])
    for index in (0, 6, 12):
        grown = _doubled(weights, f"upsample.{index}", grown)
        grown = gelu_erf(_channel_norm(weights, f"upsample.{index + 1}.norm", grown))
        grown = _conv(weights, f"upsample.{index + 3}", grown, padding=1)
        grown = gelu_erf(_channel_norm(weights, f"upsample.{index + 4}.norm", grown))
    queries = linear(tokens[:-1], weights, "final_q_proj")
    asking = layer_norm(queries, weights, "final_norm_up")
    flat = _tokens(grown)
    queries = queries + _attend(weights, "final_attn_up", asking, flat, flat, _GROWN_HEADS)
    logits = [
        np.einsum("c,cyx->yx", _mlp(weights, f"mask_mlps.{index}", query, 3), grown)
        for index, query in enumerate(queries)
    ]
    return _resized(np.stack(logits), size), _mlp(weights, "iou_head", tokens[-1], 3)


def _map(x_TD: Array, side: int) -> Array:
    return x_TD.reshape(side, side, -1).transpose(2, 0, 1)


def _tokens(x_CYX: Array) -> Array:
    return x_CYX.reshape(len(x_CYX), -1).T


def _mlp(weights: Weights, name: str, x: Array, layers: int) -> Array:
    for index in range(layers):
        x = linear(gelu_erf(x) if index else x, weights, f"{name}.{2 * index}")
    return x


def _channel_norm(weights: Weights, name: str, x_CYX: Array) -> Array:
    return layer_norm(x_CYX.transpose(1, 2, 0), weights, name).transpose(2, 0, 1)


def _group_norm(weights: Weights, name: str, x_CYX: Array, groups: int) -> Array:
    parts = x_CYX.reshape(groups, -1)
    centred = parts - parts.mean(axis=1, keepdims=True)
    parts = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    gain, shift = weight(weights, f"{name}.weight"), weight(weights, f"{name}.bias")
    return parts.reshape(x_CYX.shape) * gain[:, None, None] + shift[:, None, None]


def _attend(
    weights: Weights, name: str, query: Array, key: Array, value: Array, heads: int = _HEADS
) -> Array:
    matrices = np.split(weight(weights, f"{name}.in_proj_weight"), 3)
    shifts = np.split(weight(weights, f"{name}.in_proj_bias"), 3)
    parts = [
        (x @ matrix.T + shift).reshape(len(x), heads, -1)
        for x, matrix, shift in zip((query, key, value), matrices, shifts, strict=True)
    ]
    scores = np.einsum("qhd,khd->hqk", parts[0], parts[1]) / np.sqrt(parts[0].shape[-1])
    seen = np.einsum("hqk,khd->qhd", softmax(scores), parts[2])
    return linear(seen.reshape(len(query), -1), weights, name + ".out_proj")


def _conv(weights: Weights, name: str, x: Array, *, stride: int = 1, padding: int = 0) -> Array:
    kernel = weight(weights, f"{name}.weight")
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    size = [(side - kernel.shape[-1]) // stride + 1 for side in padded.shape[1:]]
    out = np.zeros((len(kernel), *size))
    for dy, dx in np.ndindex(*kernel.shape[2:]):
        window = padded[:, dy : dy + stride * size[0] : stride, dx : dx + stride * size[1] : stride]
        out += np.einsum("oc,cyx->oyx", kernel[:, :, dy, dx], window)
    return out + weight(weights, f"{name}.bias")[:, None, None]


def _doubled(weights: Weights, name: str, x: Array) -> Array:
    """A transposed convolution: every cell becomes two by two."""
    blocks = np.einsum("cyx,coij->oyixj", x, weight(weights, f"{name}.weight"))
    shape = (blocks.shape[0], 2 * x.shape[1], 2 * x.shape[2])
    return blocks.reshape(shape) + weight(weights, f"{name}.bias")[:, None, None]


def _resized(x_CYX: Array, size: tuple[int, ...]) -> Array:
    """Linear interpolation between centres."""
    rows, columns = (
        _weights_between(old, new) for old, new in zip(x_CYX.shape[1:], size, strict=True)
    )
    return np.einsum("ay,cyx,bx->cab", rows, x_CYX, columns)


def _weights_between(old: int, new: int) -> Array:
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))
