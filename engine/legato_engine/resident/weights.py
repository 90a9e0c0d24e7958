"""A decoder's weights as numpy arrays, and its definition: a plain forward pass.

Shape legend: B rows, D width, F inner width, V vocabulary, L layers, P positions, H heads, E head
dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from legato_engine.resident.maps import Floats, Map, gelu
from legato_engine.resident.sizes import HEAD_DIM, ROTARY_DIM, ModelSizes
from legato_engine.resident.stream import Matrix
from legato_engine.resident.values import PLAIN, Values

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A block whose attention and MLP read the same norm (scale, shift)."""

    norm: tuple[Floats, Floats]
    maps: Mapping[Matrix, Map]


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

        def layer(shapes: dict[Matrix, tuple[int, int]]) -> Layer:
            norm = 1 + 0.1 * rng.standard_normal(dim), 0.1 * rng.standard_normal(dim)
            return Layer(norm, {name: Map.random(*shape, rng) for name, shape in shapes.items()})

        block = {
            Matrix.FC1: (inner, dim),
            Matrix.QKV: (3 * dim, dim),
            Matrix.FC2: (dim, inner),
            Matrix.PROJ: (dim, dim),
        }
        layers = [layer(block) for _ in range(sizes.num_layers)]
        layers.append(layer({Matrix.HEAD: (sizes.vocab_size, dim)}))
        embedding = rng.standard_normal((sizes.vocab_size, dim))
        if sizes.values is None:
            return cls(sizes, embedding, layers)
        values = Values.random(sizes.values, dim, rng)
        layers[-1].maps[Matrix.HEAD].bias[[kind.token for kind in values.kinds]] += 2.5
        return cls(sizes, embedding, layers, values)

    @classmethod
    def moondream(cls, sizes: ModelSizes, tensors: Mapping[str, npt.NDArray[Any]]) -> Weights:
        """Of the tensors of a Moondream 2 checkpoint, by their names there."""

        def array(name: str) -> Floats:
            return np.asarray(tensors[f"text.{name}"], np.float64)

        def named(name: str) -> Map:
            return Map(array(f"{name}.weight"), array(f"{name}.bias"))

        names = {
            Matrix.FC1: "mlp.fc1",
            Matrix.QKV: "attn.qkv",
            Matrix.FC2: "mlp.fc2",
            Matrix.PROJ: "attn.proj",
        }
        layers = []
        for index in range(sizes.num_layers):
            norm = named(f"blocks.{index}.ln")
            maps = {matrix: named(f"blocks.{index}.{name}") for matrix, name in names.items()}
            layers.append(Layer((norm.weight, norm.bias), maps))
        final = named("post_ln")
        layers.append(Layer((final.weight, final.bias), {Matrix.HEAD: named("lm_head")}))
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
    """What S steps gave: tokens [S][B], residual streams [S, L, B, D], best logits [S, B], with
    values what each token has [S][B] (see `values.PLAIN`), and with drafts those of each row.
    """

    tokens: list[list[int]]
    trace: Floats
    best: Floats
    values: list[list[tuple[float, ...]]] = dataclasses.field(default_factory=list)
    accepted: list[list[list[int]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How a row's token is drawn; greedily with temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


GREEDY = Rule()


def noise_of(rule: Rule, position: int, size: int) -> Floats:
    """Of each token of a vocabulary."""
    return np.random.default_rng((rule.seed, position)).gumbel(size=size)


def draw(logits: Floats, rule: Rule, position: int) -> int:
    """A row's token from its logits [V], by noise of its seed and position; -1: not finite."""
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
    """Steps by the model's definition; rows without a rule are greedy, and the first tokens' values
    are those of `PLAIN`.
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
            qkv = layer.maps[Matrix.QKV](normed).reshape(rows, 3, sizes.num_heads, HEAD_DIM)
            q, k = (rotate(qkv[:, which], position) for which in (0, 1))
            keys[index] = np.concatenate([keys[index], k[None]])
            values[index] = np.concatenate([values[index], qkv[None, :, 2]])
            scores = np.einsum("bhe,pbhe->bhp", q, keys[index]) / HEAD_DIM**0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            heads = np.einsum("bhp,pbhe->bhe", shares, values[index]).reshape(rows, sizes.dim)
            act = gelu(layer.maps[Matrix.FC1](normed))
            x = x + layer.maps[Matrix.FC2](act) + layer.maps[Matrix.PROJ](heads)
            trace[step, index] = x
        final = weights.layers[-1]
        logits = final.maps[Matrix.HEAD](layer_norm(x, final.norm))
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
