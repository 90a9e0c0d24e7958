"""Greedy decoding, a token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.moondream3 import region, text
from tests.reference.moondream3.config import Config
from tests.reference.moondream3.numerics import Array, Weights
from tests.reference.moondream3.prompts import Coord, Size, Text, Token


def embed(token: Token, config: Config, weights: Weights) -> Array:
    """The input embedding [D] of a token; a value's embedding replaces that of its id."""
    match token:
        case Text(token_id):
            return weights["text.wte"][token_id].astype(np.float64)
        case Coord(value):
            return region.encode_coord(value, config, weights)
        case Size(width, height):
            return region.encode_size(width, height, config, weights)


def sequence_embeddings(
    prompt: Sequence[Token], image_PD: Array | None, config: Config, weights: Weights
) -> tuple[Array, int]:
    """BOS, the image, the prompt: [T, D]; and how many of them attend both ways.

    Without an image none do.
    """
    bos_D = embed(Text(config.ids.bos), config, weights)
    prompt_TD = [embed(token, config, weights) for token in prompt]
    if image_PD is None:
        return np.stack([bos_D, *prompt_TD]), 0
    return np.stack([bos_D, *image_PD, *prompt_TD]), config.image_prefix


@dataclass(frozen=True)
class Step:
    """One choice and what it was chosen from."""

    token: Token
    token_id: int
    hidden_D: Array  # before post_ln
    logits_V: Array  # of tokens, before any is ruled out
    bins: (
        Array | None
    )  # [coord_bins] where the token is a coordinate, [2, size_bins] where it is a size


class Decoder:
    """A sequence that grows.

    `embeddings_TD` are all positions so far, `hidden_D` is the residual stream of the last one,
    before post_ln. Without `cached` all positions are computed again for every token.
    """

    def __init__(
        self,
        prompt: Sequence[Token],
        image_PD: Array | None,
        config: Config,
        weights: Weights,
        cached: bool = True,
    ):
        self.config = config
        self.weights = weights
        self._cached = cached
        self.embeddings_TD, self.prefix = sequence_embeddings(prompt, image_PD, config, weights)
        hidden_TD, self._cache = text.prefill(self.embeddings_TD, self.prefix, config, weights)
        self.hidden_D = hidden_TD[-1]

    def feed(self, token: Token) -> None:
        """Adds a position."""
        embedding_D = embed(token, self.config, self.weights)
        self.embeddings_TD = np.concatenate([self.embeddings_TD, embedding_D[None]])
        if self._cached:
            self.hidden_D, self._cache = text.decode_step(
                embedding_D, self._cache, self.config, self.weights
            )
        else:
            self.hidden_D = text.recompute(
                self.embeddings_TD, self.prefix, self.config, self.weights
            )[-1]

    def logits(self) -> Array:
        """Of the next token: [V]."""
        return text.logits(self.hidden_D, self.weights)

    def _step(self, token_id: int, logits_V: Array, spatial: bool) -> Step:
        """A choice with its bin, which is read from the hidden state that chose the id."""
        config, hidden_D = self.config, self.hidden_D
        if spatial and token_id == config.ids.coord:
            bins = region.coord_logits(hidden_D, config, self.weights)
            coord = Coord(region.coord_value(int(bins.argmax()), config))
            return Step(coord, token_id, hidden_D, logits_V, bins)
        if spatial and token_id == config.ids.size:
            bins = region.size_logits(hidden_D, config, self.weights)
            width, height = (region.size_value(int(index), config) for index in bins.argmax(-1))
            return Step(Size(width, height), token_id, hidden_D, logits_V, bins)
        return Step(Text(token_id), token_id, hidden_D, logits_V, None)

    def choose(self, spatial: bool = True) -> Step:
        """The likeliest of all tokens; with `spatial`, coord and size ids stand for values."""
        logits_V = self.logits()
        return self._step(int(logits_V.argmax()), logits_V, spatial)

    def choose_or_end(self, token_id: int) -> Step:
        """That token or the end, as the switch `boundary` says."""
        logits_V, eos = self.logits(), self.config.ids.eos
        if self.config.switches.boundary == "restricted":
            ends = logits_V[eos] >= logits_V[token_id]
        else:
            ends = logits_V.argmax() == eos
        return self._step(eos if ends else token_id, logits_V, spatial=True)

    def choose_only(self, token_id: int) -> Step:
        """That token, whatever the logits say."""
        return self._step(token_id, self.logits(), spatial=True)
