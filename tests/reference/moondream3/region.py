"""Coordinates and sizes: values to embeddings, hidden states to bins.

Shapes: D the text model's width, F frequencies. Values are shares of the whole image, x before y
and width before height.
"""

import math

import numpy as np

from tests.reference.moondream3.config import Config
from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    layer_norm,
    linear,
    round_bfloat16,
    weight,
)

SIZE_OCTAVES = 10  # sizes are 2^-10 .. 1


def fourier(values: Array, features_NF: Array, config: Config) -> Array:
    """N values to [2 F]: the cosines of all phases, then their sines."""
    if config.switches.fourier == "exact":
        phases_F = (2 * math.pi * values) @ features_NF
        return np.concatenate([np.cos(phases_F), np.sin(phases_F)])
    turns = round_bfloat16(2 * math.pi * round_bfloat16(values))
    phases_F = round_bfloat16(turns @ features_NF)
    return round_bfloat16(np.concatenate([np.cos(phases_F), np.sin(phases_F)]))


def encode_coord(value: float, config: Config, weights: Weights) -> Array:
    """The embedding [D] of a coordinate."""
    features = fourier(np.array([value]), weight(weights, "region.coord_features"), config)
    return linear(features, weights, "region.coord_encoder")


def encode_size(width: float, height: float, config: Config, weights: Weights) -> Array:
    """The embedding [D] of a size."""
    features = fourier(np.array([width, height]), weight(weights, "region.size_features"), config)
    return linear(features, weights, "region.size_encoder")


def _decoder_input(hidden_D: Array, config: Config, weights: Weights) -> Array:
    if config.switches.region_hidden == "post_ln":
        hidden_D = layer_norm(hidden_D, weights, "text.post_ln")
    return layer_norm(hidden_D, weights, "region.ln") if config.switches.region_norm else hidden_D


def coord_logits(hidden_D: Array, config: Config, weights: Weights) -> Array:
    """The hidden state before post_ln to [coord_bins]."""
    return linear(_decoder_input(hidden_D, config, weights), weights, "region.coord_decoder")


def size_logits(hidden_D: Array, config: Config, weights: Weights) -> Array:
    """The hidden state before post_ln to [2, size_bins], those of the width first."""
    both = linear(_decoder_input(hidden_D, config, weights), weights, "region.size_decoder")
    return both.reshape(2, config.region.size_bins)


def _value(value: float, config: Config) -> float:
    return float(round_bfloat16(np.array(value))) if config.switches.round_values else value


def coord_value(index: int, config: Config) -> float:
    """The coordinate that a bin stands for."""
    last = config.switches.coord_divisor == "bins_minus_one"
    return _value(index / (config.region.coord_bins - (1 if last else 0)), config)


def size_value(index: int, config: Config) -> float:
    """The width or height that a bin stands for, 2^-10 .. 1."""
    share = index / (config.region.size_bins - 1)
    return _value(2.0 ** (SIZE_OCTAVES * share - SIZE_OCTAVES), config)


def size_position(value: float, config: Config) -> float:
    """Where among the bins a width or height lies: size_value's inverse, not rounded to a bin."""
    octave = math.log2(max(value, 2.0**-SIZE_OCTAVES)) + SIZE_OCTAVES
    return octave / SIZE_OCTAVES * (config.region.size_bins - 1)
