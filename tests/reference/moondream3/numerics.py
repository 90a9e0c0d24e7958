"""The functions every part is made of, in float64."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

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
