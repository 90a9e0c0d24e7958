"""The megakernel's step in float64: weights, values, sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from legato_engine.kernels.megakernel.program import Op
from legato_engine.kernels.megakernel.sizes import (
    FAR_DIGITS,
    HEAD_DIM,
    NEAR_DIGITS,
    NEAR_RANGES,
    RANGES,
    ROTARY_DIM,
    ModelSizes,
    ValueDims,
)

Floats = npt.NDArray[np.float64]
FIRST_DIGITS = 21  # of a unit of distance: as sample.cuh has it


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """A matrix [outputs, inputs] and its bias."""

    weight: Floats
    bias: Floats

    @classmethod
    def random(cls, outputs: int, inputs: int, rng: np.random.Generator) -> Map:
        """One that keeps the deviation of what it maps."""
        weight = rng.standard_normal((outputs, inputs)) / inputs**0.5
        return cls(weight, 0.1 * rng.standard_normal(outputs))

    def __call__(self, x: Floats) -> Floats:
        """[..., inputs] to [..., outputs]."""
        out: Floats = x @ self.weight.T + self.bias
        return out


def gelu(x: Floats) -> Floats:
    """Compute GELU by its tanh approximation."""
    out: Floats = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return out


# ---------------------------------------------------------------- values

# Values of tokens as numpy arrays: how they are read and fed back, plainly.
#
# A `scalar` token carries one value, a `pair` token two. This is the arithmetic of
# `kernels.value_heads`, in float64.
#
# Shape legend: D width, F frequencies, N bins of a value.

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
        """Make random weights of `count` values; `dims`: D, inner width, bins of all values."""
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
        """Read a token's values, as `PLAIN` without any; its logits are constrained."""
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


# ---------------------------------------------------------------- weights

# A decoder's weights as numpy arrays, and its definition: a plain forward pass.
#
# Shape legend: B rows, D width, F inner width, V vocabulary, L layers, P positions, H heads, E head
# dim.

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A block whose attention and MLP read the same norm (scale, shift)."""

    norm: tuple[Floats, Floats]
    maps: Mapping[Op, Map]


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """`layers` ends with the final norm and the head; `values` as the sizes have them."""

    sizes: ModelSizes
    embedding: Floats
    layers: list[Layer]
    values: Values | None = None

    @classmethod
    def random(cls, sizes: ModelSizes, rng: np.random.Generator) -> Weights:
        """Weights that keep the deviation of what they map; tokens with values are likely."""
        dim, inner = sizes.dim, sizes.ff_dim

        def layer(shapes: dict[Op, tuple[int, int]]) -> Layer:
            norm = 1 + 0.1 * rng.standard_normal(dim), 0.1 * rng.standard_normal(dim)
            return Layer(norm, {name: Map.random(*shape, rng) for name, shape in shapes.items()})

        block = {
            Op.FC1: (inner, dim),
            Op.QKV: (3 * dim, dim),
            Op.FC2: (dim, inner),
            Op.OUT: (dim, dim),
        }
        layers = [layer(block) for _ in range(sizes.num_layers)]
        layers.append(layer({Op.HEAD: (sizes.vocab_size, dim)}))
        embedding = rng.standard_normal((sizes.vocab_size, dim))
        if sizes.values is None:
            return cls(sizes, embedding, layers)
        values = Values.random(sizes.values, dim, rng)
        layers[-1].maps[Op.HEAD].bias[[kind.token for kind in values.kinds]] += 2.5
        return cls(sizes, embedding, layers, values)

    @classmethod
    def moondream(cls, sizes: ModelSizes, tensors: Mapping[str, npt.NDArray[Any]]) -> Weights:
        """Build weights from the tensors of a Moondream 2 checkpoint, by name."""

        def array(name: str) -> Floats:
            return np.asarray(tensors[f"text.{name}"], np.float64)

        def named(name: str) -> Map:
            return Map(array(f"{name}.weight"), array(f"{name}.bias"))

        names = {
            Op.FC1: "mlp.fc1",
            Op.QKV: "attn.qkv",
            Op.FC2: "mlp.fc2",
            Op.OUT: "attn.proj",
        }
        layers = []
        for index in range(sizes.num_layers):
            norm = named(f"blocks.{index}.ln")
            maps = {matrix: named(f"blocks.{index}.{name}") for matrix, name in names.items()}
            layers.append(Layer((norm.weight, norm.bias), maps))
        final = named("post_ln")
        layers.append(Layer((final.weight, final.bias), {Op.HEAD: named("lm_head")}))
        return cls(sizes, array("wte"), layers)


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values [L, P, B, H, E] of positions that are there before a launch."""

    keys: Floats
    values: Floats

    @classmethod
    def random(
        cls, sizes: ModelSizes, positions: int, rows: int, rng: np.random.Generator
    ) -> Cache:
        """Random contents."""
        shape = (sizes.num_layers, positions, rows, sizes.num_heads, HEAD_DIM)
        return cls(rng.standard_normal(shape), rng.standard_normal(shape))

    @property
    def length(self) -> int:
        """Positions."""
        return int(self.keys.shape[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Results of S steps: tokens [S][B], residual streams [S, L, B, D], best logits [S, B].

    With values each token's [S][B] (see `values.PLAIN`), and with drafts each row's.
    """

    tokens: list[list[int]]
    trace: Floats
    best: Floats
    values: list[list[tuple[float, ...]]] = dataclasses.field(default_factory=list)
    accepted: list[list[list[int]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Sampling rule of a row; greedy with temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


GREEDY = Rule()


def noise_of(rule: Rule, position: int, size: int) -> Floats:
    """Return the noise of each token of a vocabulary."""
    return np.random.default_rng((rule.seed, position)).gumbel(size=size)


def draw(logits: Floats, rule: Rule, position: int) -> int:
    """Draw a row's token from its logits [V], by noise of its seed and position; -1: not finite."""
    if not np.isfinite(logits).all():
        return -1
    if rule.temperature == 0.0:
        return int(logits.argmax())
    scores = logits / rule.temperature
    order = np.argsort(-scores, kind="stable")
    shares = np.exp(scores[order] - scores.max())
    before = np.cumsum(shares) - shares
    kept = order[before <= rule.top_p * shares.sum()][: rule.top_k or None]
    noise = noise_of(rule, position, len(logits))
    return int(kept[(scores + noise)[kept].argmax()])


def forward(
    weights: Weights, cache: Cache, tokens: list[int], steps: int, rules: Sequence[Rule] = ()
) -> Outcome:
    """Compute steps by the model's definition.

    Rows without a rule are greedy, and the first tokens' values are those of `PLAIN`.
    """
    rules = [*rules, *[GREEDY] * (len(tokens) - len(rules))]
    sizes, rows = weights.sizes, len(tokens)
    keys, values = list(cache.keys), list(cache.values)
    trace = np.empty((steps, sizes.num_layers, rows, sizes.dim))
    best, chosen = np.empty((steps, rows)), []
    read = weights.values
    had: list[list[tuple[float, ...]]] = [[PLAIN] * rows]
    for step in range(steps):
        position = cache.length + step
        x = weights.embedding[tokens]
        if read is not None:
            fed = zip(tokens, had[-1], strict=True)
            x = np.stack([read.embed(weights.embedding, *row) for row in fed])
        for index, layer in enumerate(weights.layers[:-1]):
            normed = layer_norm(x, layer.norm)
            qkv = layer.maps[Op.QKV](normed).reshape(rows, 3, sizes.num_heads, HEAD_DIM)
            q, k = (rotate(qkv[:, which], position) for which in (0, 1))
            keys[index] = np.concatenate([keys[index], k[None]])
            values[index] = np.concatenate([values[index], qkv[None, :, 2]])
            scores = np.einsum("bhe,pbhe->bhp", q, keys[index]) / HEAD_DIM**0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            heads = np.einsum("bhp,pbhe->bhe", shares, values[index]).reshape(rows, sizes.dim)
            act = gelu(layer.maps[Op.FC1](normed))
            x = x + layer.maps[Op.FC2](act) + layer.maps[Op.OUT](heads)
            trace[step, index] = x
        final = weights.layers[-1]
        logits = final.maps[Op.HEAD](layer_norm(x, final.norm))
        tokens = [draw(*row, position + 1) for row in zip(logits, rules, strict=True)]
        chosen.append(tokens)
        best[step] = logits.max(-1)
        if read is not None:
            each = zip(tokens, x, logits, strict=True)
            had.append([read.read(t, read.bins(hidden, t), row) for t, hidden, row in each])
    return Outcome(chosen, trace, best, had[1:])


def layer_norm(x: Floats, norm: tuple[Floats, Floats]) -> Floats:
    """Rows with mean 0 and deviation 1, scaled and shifted."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    out: Floats = centred / deviation * norm[0] + norm[1]
    return out


def angles(position: int) -> tuple[Floats, Floats]:
    """Cosines and sines of a position's rotated pairs."""
    turns = position / 10000.0 ** (np.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    return np.cos(turns), np.sin(turns)


def rotate(x: Floats, position: int) -> Floats:
    """[..., E]: pairs (i, i + 16) of the first 32 dimensions turn."""
    half = ROTARY_DIM // 2
    cosine, sine = angles(position)
    a, b = x[..., :half], x[..., half:ROTARY_DIM]
    turned = [a * cosine - b * sine, a * sine + b * cosine, x[..., ROTARY_DIM:]]
    return np.concatenate(turned, axis=-1)


# ---------------------------------------------------------------- draws

# How a row's token is drawn by all workers, in the simulator.
#
# The token with the best sum of score and noise among those that are kept: the first ones by
# falling score, while the mass before them is at most `top_p` of all and they are fewer than
# `top_k`. Each worker weighs a slice of the vocabulary in ranges of distance from the highest
# score. In the sums of all slices the row's worker finds the range of the last kept token: ranges
# before it are kept whole, those after it not at all. Only if the best token of that range is
# better than those before it the scores themselves say whether it is kept, and if not, which is the
# next best.

Token = tuple[float, float, int]
"""Score with noise, score, and the id's opposite: of equal ones the lowest id is best."""
NO_TOKEN: Token = (-np.inf, -np.inf, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Weighed:
    """Partial sums of a slice: each range's mass, count and best token so far."""

    mass: Floats
    count: Floats
    best: tuple[Token, ...]


NOTHING_WEIGHED = Weighed(
    np.full(RANGES, np.nan), np.full(RANGES, np.nan), ((np.nan, np.nan, 0),) * RANGES
)


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row's rule, its highest score by the temperature, and each token's noise [V]."""

    rule: Rule
    peak: float
    noise: Floats

    @classmethod
    def of(cls, highest: float, rule: Rule, position: int, vocab_size: int) -> DrawnRow:
        return cls(rule, highest / rule.temperature, noise_of(rule, position, vocab_size))

    def tokens(self, first: int, logits: Floats) -> list[Token]:
        """Weigh tokens with consecutive ids."""
        scores = logits / self.rule.temperature
        totals = scores + self.noise[first : first + len(logits)]
        ids = range(first, first + len(logits))
        return [(*each, -id) for *each, id in zip(totals, scores, ids, strict=True)]

    def range_of(self, token: Token) -> int:
        distance = self.peak - token[1]
        if not np.isfinite(distance):
            return RANGES - 1
        digit = int(distance * FIRST_DIGITS)
        near = NEAR_RANGES * NEAR_DIGITS
        far = NEAR_RANGES + (digit - near) // FAR_DIGITS
        return digit // NEAR_DIGITS if digit < near else min(far, RANGES - 1)

    def mass(self, token: Token) -> float:
        return float(np.exp(token[1] - self.peak))


def own_slice(sizes: ModelSizes, worker: int) -> slice:
    """Whole fours of the vocabulary."""
    length = 4 * -(-sizes.vocab_size // (4 * sizes.num_workers))
    return slice(worker * length, min((worker + 1) * length, sizes.vocab_size))


def weigh(row: DrawnRow, first: int, logits: Floats) -> Weighed:
    mass, count = np.zeros(RANGES), np.zeros(RANGES)
    best = [NO_TOKEN] * RANGES
    for token in row.tokens(first, logits):
        at = row.range_of(token)
        mass[at] += row.mass(token)
        count[at] += 1
        best[at:] = [max(each, token) for each in best[at:]]
    return Weighed(mass, count, tuple(best))


def choose(row: DrawnRow, weighed: list[Weighed], logits: Floats) -> int:
    """Choose the token from all workers' partial sums and the row's logits [V]."""
    mass, count = (sum(getattr(each, name) for each in weighed) for name in ("mass", "count"))
    limit = row.rule.top_p * mass.sum()
    most = row.rule.top_k or len(logits)
    masses, counts = np.cumsum(mass) - mass, np.cumsum(count) - count
    (begun,) = ((count > 0) & (masses <= limit) & (counts < most)).nonzero()
    if not len(begun):
        return -1
    last = int(begun[-1])
    below = NO_TOKEN if last == 0 else max(each.best[last - 1] for each in weighed)
    best = max(each.best[last] for each in weighed)
    rivals = [token for token in row.tokens(0, logits) if row.range_of(token) == last]
    while best > below:
        before = [token for token in rivals if token[1:] > best[1:]]
        reached = masses[last] + sum(map(row.mass, before))
        if reached <= limit and counts[last] + len(before) < most:
            return -best[2]
        best = max([below, *before])
    return -below[2]
