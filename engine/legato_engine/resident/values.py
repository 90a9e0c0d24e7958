"""Values of tokens as numpy arrays: how they are read and fed back, plainly.

A `scalar` token carries one value, a `pair` token two. This is the arithmetic of
`kernels.value_heads`, in float64.

Shape legend: D width, F frequencies, N bins of a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from legato_engine.resident.maps import Floats, Map, gelu
from legato_engine.resident.sizes import ValueDims

Value = tuple[float, ...]
"""Both values of a token, and the certainties of its kind and of them."""
PLAIN: Value = (0.0, 0.0, 1.0, 1.0)
"""What a token without values has."""
_OCTAVES = 10.0  # of a pair's values, even by logarithm


@dataclasses.dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of token: its id, encoder and two-layer decoder; a pair has two rows of frequencies.

    `reach`: bins up to so far from the likeliest count as close to it.
    """

    token: int
    frequencies: Floats
    encoder: Map
    fc1: Map
    fc2: Map
    reach: int

    @classmethod
    def random(
        cls, token: int, count: int, dims: tuple[int, int, int], rng: np.random.Generator
    ) -> ValueKind:
        """Of `count` values; `dims` are D, the inner width, and bins of all values."""
        dim, inner, bins = dims
        return cls(
            token,
            rng.standard_normal((count, 8)),
            Map.random(dim, 16, rng),
            Map.random(inner, dim, rng),
            Map.random(bins, inner, rng),
            reach=2,
        )

    def encode(self, payload: Value) -> Floats:
        """[D] of a token's values."""
        count = len(self.frequencies)
        phase = 2 * np.pi * np.array(payload[:count]) @ self.frequencies
        encoded: Floats = self.encoder(np.concatenate([np.cos(phase), np.sin(phase)]))
        return encoded


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """Both kinds, in the order of their inner activations and bins; the token that ends a list."""

    scalar: ValueKind
    pair: ValueKind
    end: int

    @classmethod
    def random(cls, dims: ValueDims, dim: int, rng: np.random.Generator) -> Values:
        """Tokens 0 to 2 are the end and both kinds."""
        scalar = ValueKind.random(1, 1, (dim, dims.inner_dim, dims.scalar_bins), rng)
        pair = ValueKind.random(2, 2, (dim, dims.inner_dim, dims.pair_bins), rng)
        return cls(scalar, pair, 0)

    @property
    def kinds(self) -> tuple[ValueKind, ValueKind]:
        return self.scalar, self.pair

    def embed(self, words: Floats, token: int, payload: Value) -> Floats:
        """[D] of a token."""
        kind = next((kind for kind in self.kinds if kind.token == token), None)
        embedded: Floats = words[token] if kind is None else kind.encode(payload)
        return embedded

    def bins(self, hidden: Floats, token: int) -> Floats | None:
        """Logits of the bins of a token's values, of its final residual stream [D]."""
        for kind in self.kinds:
            if kind.token == token:
                return kind.fc2(gelu(kind.fc1(hidden)))
        return None

    def read(self, token: int, bins: Floats | None, logits: Floats) -> Value:
        """What a token has, as `PLAIN`; its logits are constrained."""
        if bins is None:
            return PLAIN
        existence = 1 / (1 + np.exp(logits[self.end] - logits[token]))
        values, near = zip(*self._each(token, bins), strict=True)
        return (*values, *[0.0] * (2 - len(values)), float(existence), float(np.prod(near)))

    def _each(self, token: int, bins: Floats) -> Iterator[tuple[float, float]]:
        is_pair = token == self.pair.token
        kind = self.kinds[is_pair]
        for logits in bins.reshape(len(kind.frequencies), -1):
            likeliest, count = int(logits.argmax()), len(logits)
            shares = np.exp(logits - logits.max())
            near = np.abs(np.arange(count) - likeliest) <= kind.reach
            octaves = likeliest / (count - 1) * _OCTAVES - _OCTAVES
            value = 2.0**octaves if is_pair else likeliest / count
            yield value, float(shares[near].sum() / shares.sum())
