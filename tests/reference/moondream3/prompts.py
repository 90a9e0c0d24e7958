"""The prompt after the image, and coordinates and sizes as embeddings and bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.moondream3.config import Config, Length, TokenIds
from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    layer_norm,
    linear,
    round_bfloat16,
    weight,
)

# ---------------------------------------------------------------- region
# Coordinates and sizes: values to embeddings, hidden states to bins.
#
# Shapes: D the text model's width, F frequencies. Values are shares of the whole image, x before
# y
# and width before height.

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


# ---------------------------------------------------------------- prompts
# The prompt after the image: ids, and values of hints.


@dataclass(frozen=True)
class Text:
    """A token of the vocabulary."""

    id: int


@dataclass(frozen=True)
class Coord:
    """A coordinate as a token."""

    value: float


@dataclass(frozen=True)
class Size:
    """A width and a height as a token."""

    width: float
    height: float


Token = Text | Coord | Size
Ref = Sequence[float]
"""A hint: a point (x, y) or a box (x0, y0, x1, y1)."""


def object_text(skill: str, text: str) -> str:
    """The text of an object's name: stripped, after a space for detect and point."""
    return (" " if skill in ("detect", "point") else "") + text.strip()


def texts(ids: Sequence[int]) -> list[Token]:
    """Ids as tokens."""
    return [Text(token_id) for token_id in ids]


def hints(refs: Sequence[Ref]) -> list[Token]:
    """A point is two coordinates, a box those of its centre and a size; no value is rounded.

    Raises:
        ValueError: not 2 or 4 finite values of 0..1, or a box whose end is before its start.
    """
    tokens: list[Token] = []
    for ref in refs:
        if len(ref) not in (2, 4) or not all(math.isfinite(v) and 0 <= v <= 1 for v in ref):
            raise ValueError(f"{ref} is not 2 or 4 values of 0..1")
        if len(ref) == 2:
            tokens += [Coord(ref[0]), Coord(ref[1])]
            continue
        x0, y0, x1, y1 = ref
        if x0 > x1 or y0 > y1:
            raise ValueError(f"{ref} ends before it starts")
        tokens += [Coord((x0 + x1) / 2), Coord((y0 + y1) / 2), Size(x1 - x0, y1 - y0)]
    return tokens


def _template(
    ids: TokenIds, words: Sequence[int], rest: list[Token], opener: int | None = None
) -> list[Token]:
    end = ids.answer if opener is None else opener
    return [Text(ids.open), *texts(words), Text(ids.separator), *rest, Text(end)]


def caption_prompt(ids: TokenIds, length: Length) -> list[Token]:
    """Describe, and how long."""
    words = {"short": ids.short, "normal": ids.normal, "long": ids.long}[length]
    return _template(ids, ids.describe, texts(words))


def query_prompt(
    ids: TokenIds, question: Sequence[int], refs: Sequence[Ref] = (), reasoning: bool = False
) -> list[Token]:
    """A question, to be answered at once or after thinking."""
    opener = ids.thinking if reasoning else ids.answer
    return _template(ids, ids.query, [*hints(refs), *texts(question)], opener)


def detect_prompt(ids: TokenIds, name: Sequence[int]) -> list[Token]:
    """The boxes of all objects of a name."""
    return _template(ids, ids.detect, texts(name))


def point_prompt(ids: TokenIds, name: Sequence[int], refs: Sequence[Ref] = ()) -> list[Token]:
    """The centres of all objects of a name."""
    return _template(ids, ids.point, [*hints(refs), *texts(name)])


def segment_prompt(ids: TokenIds, name: Sequence[int], refs: Sequence[Ref] = ()) -> list[Token]:
    """The outline of one object of a name."""
    return _template(ids, ids.segment, [*hints(refs), *texts(name)])
