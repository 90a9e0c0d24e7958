"""Numbers in fp8: e4m3 codes (the variant without infinities) times a scale.

Experts have a scale an output row, keys and values one a layer each.
"""

import numpy as np
from numpy.typing import NDArray

from tests.reference.moondream3.numerics import Array, Weights, weight

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
