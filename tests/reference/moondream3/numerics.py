"""The functions every part is made of, in float64, and numbers in fp8."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tests.reference.moondream3.config import Config

Array = NDArray[np.float64]
Weights = Mapping[str, NDArray[np.generic]]

LAYER_NORM_EPS = 1e-5  # in the vision encoder too

_erf = np.vectorize(math.erf, otypes=[np.float64])


def weight(weights: Weights, name: str) -> Array:
    """A weight in float64, whatever it is kept in."""
    return weights[name].astype(np.float64)


def linear(x: Array, weights: Weights, name: str) -> Array:
    """A product of x [..., in] and `name`.weight [out, in], plus `name`.bias: [..., out]."""
    return x @ weight(weights, f"{name}.weight").T + weight(weights, f"{name}.bias")


def layer_norm(x: Array, weights: Weights, name: str) -> Array:
    """Normalises the last axis (the variance is that of all its values, not of a sample)."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    normed = (x - mean) / np.sqrt(variance + LAYER_NORM_EPS)
    return normed * weight(weights, f"{name}.weight") + weight(weights, f"{name}.bias")


def gelu_tanh(x: Array) -> Array:
    """The approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    """The exact one."""
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), which tanh gives without overflow."""
    return 0.5 * (1 + np.tanh(x / 2))


def softmax(x: Array) -> Array:
    """Over the last axis; -inf gives 0."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attend(q_HTK: Array, k_HSK: Array, v_HSK: Array, visible_TS: NDArray[np.bool_]) -> Array:
    """Scaled dot-product attention; heads are side by side in the result [T, H * K]."""
    scores_HTS = np.einsum("htk,hsk->hts", q_HTK, k_HSK) / math.sqrt(q_HTK.shape[-1])
    weights_HTS = softmax(np.where(visible_TS, scores_HTS, -np.inf))
    heads_THK = np.einsum("hts,hsk->thk", weights_HTS, v_HSK)
    return heads_THK.reshape(len(visible_TS), -1)


def split_heads(x_TD: Array, heads: int) -> Array:
    """[T, H * K] to [H, T, K]: heads are contiguous in a row."""
    return x_TD.reshape(len(x_TD), heads, -1).transpose(1, 0, 2)


def round_to_bits(x: Array, significant_bits: int) -> Array:
    """To the nearest number of so many significant bits, ties to even; exponents have no limit."""
    mantissa, exponent = np.frexp(x)
    scale = 2.0**significant_bits
    return np.ldexp(np.rint(mantissa * scale) / scale, exponent)


def round_bfloat16(x: Array) -> Array:
    """To bfloat16's grid (its subnormals and its infinities aside)."""
    return round_to_bits(x, 8)


MAX_E4M3 = 448.0
_MIN_EXPONENT = -6  # of normal numbers; below, the step stays the same


def decode_e4m3(codes: NDArray[np.uint8]) -> Array:
    """The values of codes: a sign, 4 bits of exponent with bias 7, 3 of mantissa.

    0x7f and 0xff are NaN.
    """
    bits = codes.astype(np.int64)
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent = (bits >> 3) & 0xF
    mantissa = bits & 0x7
    subnormal = np.ldexp(mantissa / 8.0, _MIN_EXPONENT)
    normal = np.ldexp(1 + mantissa / 8.0, exponent - 7)
    values = sign * np.where(exponent == 0, subnormal, normal)
    return np.where((bits & 0x7F) == 0x7F, np.nan, values)


def encode_e4m3(values: Array) -> NDArray[np.uint8]:
    """The codes of the nearest values, ties to even; beyond 448 the largest."""
    magnitude = np.minimum(np.abs(values), MAX_E4M3)
    smallest = 2.0**_MIN_EXPONENT
    _, exponent = np.frexp(np.maximum(magnitude, smallest))  # m * 2**exponent, m in [0.5, 1)
    step_exponent = exponent - 1 - 3
    steps = np.rint(np.ldexp(magnitude, -step_exponent)).astype(np.int64)
    # A normal number is 8..15 steps, and 16 of them are 8 of the next exponent.
    codes = ((step_exponent + 3 - _MIN_EXPONENT) << 3) + steps
    sign = np.where(np.signbit(values), 0x80, 0)
    return (codes | sign).astype(np.uint8)


def quantise_rows(matrix: Array) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """[..., rows, in] as codes of that shape and scales [..., rows]: matrix is about value * scale.

    A row's largest magnitude becomes 448. A row of zeros has scale 1.
    """
    largest = np.abs(matrix).max(axis=-1)
    scales = np.where(largest > 0, largest / MAX_E4M3, 1.0).astype(np.float32)
    return encode_e4m3(matrix / scales[..., None].astype(np.float64)), scales


def cached(values: Array, scale: Array) -> Array:
    """What is read of keys or values that are stored in fp8: codes of units of a scale."""
    return decode_e4m3(encode_e4m3(values / scale)) * scale


def expert_matrix(weights: Weights, name: str, expert: int) -> Array:
    """One expert's [rows, in] of `name`.weight [E, rows, in].

    Values of uint8 are e4m3 codes, others are taken as they are. `name`.scale [E, rows], where it
    is there, multiplies the rows.
    """
    stored = weights[f"{name}.weight"][expert]
    values = decode_e4m3(stored) if stored.dtype == np.uint8 else stored.astype(np.float64)
    if f"{name}.scale" not in weights:
        return values
    return values * weight(weights, f"{name}.scale")[expert][:, None]


# ---------------------------------------------------------------- weights
# Names and shapes of the weights, and random ones.


Shape = tuple[int, ...]
Precision = Literal["float64", "float32", "bfloat16"]


def _linear(name: str, out_width: int, in_width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out_width, in_width), f"{name}.bias": (out_width,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _vision_shapes(config: Config) -> dict[str, Shape]:
    vision, width = config.vision, config.vision.width
    shapes = _linear("vision.patch_emb", width, 3 * vision.patch**2)
    shapes["vision.pos_emb"] = (1, vision.tokens, width)
    for layer in range(vision.layers):
        block = f"vision.blocks.{layer}"
        shapes |= _norm(f"{block}.ln1", width) | _norm(f"{block}.ln2", width)
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width)
        shapes |= _linear(f"{block}.attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.fc1", vision.inner, width)
        shapes |= _linear(f"{block}.mlp.fc2", width, vision.inner)
    shapes |= _norm("vision.post_ln", width)
    shapes |= _linear("vision.proj_mlp.fc1", vision.projection_inner, 2 * width)
    return shapes | _linear("vision.proj_mlp.fc2", config.text.width, vision.projection_inner)


def _mlp_shapes(config: Config, layer: int) -> dict[str, Shape]:
    text, width, mlp = config.text, config.text.width, f"text.blocks.{layer}.mlp"
    if layer < text.dense_layers:
        return _linear(f"{mlp}.fc1", text.inner, width) | _linear(f"{mlp}.fc2", width, text.inner)
    experts = {
        f"{mlp}.fc1.weight": (text.experts, 2 * text.expert_inner, width),
        f"{mlp}.fc2.weight": (text.experts, width, text.expert_inner),
    }
    return _linear(f"{mlp}.router", text.experts, width) | experts


def _text_shapes(config: Config) -> dict[str, Shape]:
    text, width = config.text, config.text.width
    shapes: dict[str, Shape] = {"text.wte": (text.vocab, width)}
    for layer in range(text.layers):
        block = f"text.blocks.{layer}"
        shapes |= _norm(f"{block}.ln", width)
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width)
        shapes |= _linear(f"{block}.attn.proj", width, width)
        shapes[f"{block}.attn.tau.wq"] = (text.heads, 3 * width)
        shapes[f"{block}.attn.tau.wv"] = (text.heads, 3 * width)
        shapes[f"{block}.attn.tau.alpha"] = (text.heads,)
        shapes |= _mlp_shapes(config, layer)
    return shapes | _norm("text.post_ln", width) | _linear("text.lm_head", text.vocab, width)


def _region_shapes(config: Config) -> dict[str, Shape]:
    region, width = config.region, config.text.width
    shapes: dict[str, Shape] = {
        "region.coord_features": (1, region.coord_frequencies),
        "region.size_features": (2, region.size_frequencies),
    }
    shapes |= _linear("region.coord_encoder", width, 2 * region.coord_frequencies)
    shapes |= _linear("region.size_encoder", width, 2 * region.size_frequencies)
    shapes |= _linear("region.coord_decoder", region.coord_bins, width)
    shapes |= _linear("region.size_decoder", 2 * region.size_bins, width)
    return shapes | (_norm("region.ln", width) if config.switches.region_norm else {})


def weight_shapes(config: Config) -> dict[str, Shape]:
    """Every weight of layout A, without the leading `model.`."""
    return _vision_shapes(config) | _text_shapes(config) | _region_shapes(config)


def check_weights(config: Config, weights: Weights) -> None:
    """Nothing is missing, nothing is left over, and every shape is right.

    Raises:
        ValueError: names what is wrong. Scales of experts may be there or not, and so may those
            of keys and values.
    """
    wanted = weight_shapes(config)
    if not weights.keys().isdisjoint(cache_scale_names(config)):
        wanted |= dict.fromkeys(cache_scale_names(config), (1,))
    for name, shape in wanted.items():
        if name.endswith((".fc1.weight", ".fc2.weight")) and len(shape) == 3:
            scale = name.removesuffix("weight") + "scale"
            if scale in weights:
                wanted = wanted | {scale: shape[:2]}
    if missing := wanted.keys() - weights.keys():
        raise ValueError(f"missing weights: {sorted(missing)}")
    if unknown := weights.keys() - wanted.keys():
        raise ValueError(f"unknown weights: {sorted(unknown)}")
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} is {weights[name].shape}, not {shape}")


def _draw(name: str, shape: Shape, rng: np.random.Generator) -> Array:
    """One weight, so scaled that what it does is seen at the output."""
    values = rng.standard_normal(shape)
    is_norm = name.split(".")[-2] in ("ln", "ln1", "ln2", "post_ln")
    if is_norm:
        return (1.0 if name.endswith(".weight") else 0.0) + 0.3 * values
    if name.endswith(".bias"):
        return 0.3 * values
    if name.endswith(("pos_emb", "text.wte", "tau.alpha", "_features")):
        return values
    sharp = ("qkv.weight", "router.weight", "lm_head.weight", "decoder.weight", "encoder.weight")
    return (2.0 if name.endswith(sharp) else 1.0) * values / math.sqrt(shape[-1])


def _kept(values: Array, precision: Precision) -> NDArray[np.generic]:
    if precision == "float64":
        return values
    return (round_bfloat16(values) if precision == "bfloat16" else values).astype(np.float32)


def random_weights(
    config: Config, seed: int, precision: Precision = "float32"
) -> dict[str, NDArray[np.generic]]:
    """Weights that a model of that precision holds exactly, the same for the same arguments.

    They come as float64 for `float64`, else as float32. Gains are not 1 and biases are not 0.
    """
    rng = np.random.default_rng(seed)
    return {
        name: _kept(_draw(name, shape, rng), precision)
        for name, shape in weight_shapes(config).items()
    }


def cache_scale_names(config: Config) -> list[str]:
    """Those of keys and values, layer by layer."""
    layers = range(config.text.layers)
    return [f"text.blocks.{layer}.attn.{which}_scale" for layer in layers for which in "kv"]


def quantise_cache(config: Config, weights: Weights) -> dict[str, NDArray[np.generic]]:
    """The same, with scales for keys and values in fp8; a few of either are beyond the largest."""
    scales = np.linspace(0.008, 0.02, 2 * config.text.layers, dtype=np.float32)
    return dict(weights) | dict(zip(cache_scale_names(config), scales[:, None], strict=True))


def _expert_names(config: Config) -> Iterator[str]:
    for layer in range(config.text.dense_layers, config.text.layers):
        yield f"text.blocks.{layer}.mlp.fc1"
        yield f"text.blocks.{layer}.mlp.fc2"


def quantise_experts(config: Config, weights: Weights) -> dict[str, NDArray[np.generic]]:
    """The same, but experts as e4m3 codes (uint8), with `fc1.scale`, `fc2.scale` [E, rows]."""
    quantised = dict(weights)
    for name in _expert_names(config):
        codes, scales = quantise_rows(weight(weights, f"{name}.weight"))
        quantised |= {f"{name}.weight": codes, f"{name}.scale": scales}
    return quantised
