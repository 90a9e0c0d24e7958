"""The functions every part is made of, in float64, and numbers in fp8."""

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
