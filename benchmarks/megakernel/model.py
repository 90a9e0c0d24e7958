"""A decoder with random weights for the resident kernel, and its forward pass in plain torch.

Shape legend: B rows, D width, F inner width, V vocabulary, H heads, E head dim, P positions, R half
of the rotated dims, L layers, N pages, M pages of a row, S positions of a page.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from legato_engine.kernels.cuda.skinny_gemm import pack
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    TwoLayerValues,
    ValueEncoder,
    ValueSizes,
)
from legato_engine.kernels.megakernel.sizes import HEAD_DIM, PAGE, ROTARY_DIM, ModelSizes
from legato_engine.kernels.parameters import Affine, DecoderLayer, DenseMlp

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Linear:
    """A map with its bias."""

    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def random(
        cls, outputs: int, inputs: int, gain: float = 1.0, device: torch.device = DEVICE
    ) -> Linear:
        """Make a map of inputs with deviation 1 to outputs with deviation `gain`."""
        weight = torch.randn(outputs, inputs, device=device, dtype=DTYPE) * gain / inputs**0.5
        return cls(weight, torch.randn(outputs, device=device, dtype=DTYPE) * 0.1)

    @property
    def affine(self) -> Affine:
        """As kernels take it."""
        return Affine(self.weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """In float32."""
        return x.float() @ self.weight.float().T + self.bias.float()


@dataclasses.dataclass(frozen=True)
class Layer:
    """A block whose attention and MLP read the same norm."""

    norm: tuple[torch.Tensor, torch.Tensor]
    fc1: Linear
    qkv: Linear
    fc2: Linear
    proj: Linear

    @property
    def parameters(self) -> DecoderLayer:
        """As kernels take them."""
        mlp = DenseMlp(self.fc1.affine, self.fc2.affine)
        return DecoderLayer(Affine(*self.norm), self.qkv.affine, self.proj.affine, mlp)


@dataclasses.dataclass(frozen=True)
class Model:
    """All weights, and the tables of rotations [P, R] float32."""

    sizes: ModelSizes
    embedding: torch.Tensor
    layers: list[Layer]
    norm: tuple[torch.Tensor, torch.Tensor]
    head: Linear
    cosines: torch.Tensor
    sines: torch.Tensor

    @classmethod
    def random(cls, sizes: ModelSizes, positions: int, device: torch.device = DEVICE) -> Model:
        """Random weights."""
        dim = sizes.dim
        linear = functools.partial(Linear.random, device=device)
        layers = [
            Layer(
                norm=_norm(dim, device),
                fc1=linear(sizes.ff_dim, dim),
                qkv=linear(3 * dim, dim),
                fc2=linear(dim, sizes.ff_dim, 0.5),
                proj=linear(dim, dim, 0.5),
            )
            for _ in range(sizes.num_layers)
        ]
        embedding = torch.randn(sizes.vocab_size, dim, device=device, dtype=DTYPE)
        exponent = torch.arange(0, ROTARY_DIM, 2, device=device, dtype=torch.float32) / ROTARY_DIM
        angles = torch.arange(positions, device=device)[:, None] / 10000.0**exponent
        head = linear(sizes.vocab_size, dim, 2.0)
        return cls(sizes, embedding, layers, _norm(dim, device), head, angles.cos(), angles.sin())


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values [L, N, H, S, E] and each row's pages [B, M]."""

    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def random(
        cls, sizes: ModelSizes, rows: int, row_pages: int, device: torch.device = DEVICE
    ) -> Cache:
        """Random contents; the rows' pages in random order."""
        shape = (sizes.num_layers, rows * row_pages, sizes.num_heads, PAGE, HEAD_DIM)
        keys, values = (torch.randn(shape, device=device, dtype=DTYPE) for _ in range(2))
        pages = torch.randperm(rows * row_pages, device=device, dtype=torch.int32)
        return cls(keys, values, pages.view(rows, row_pages))

    def clone(self) -> Cache:
        """Copy the cache, so that another forward pass may write it."""
        return Cache(self.keys.clone(), self.values.clone(), self.pages)


@dataclasses.dataclass
class Taps:
    """What a forward pass computed on its way, of the last layer but for `x`."""

    x: list[torch.Tensor] = dataclasses.field(default_factory=list)
    act: torch.Tensor = dataclasses.field(default_factory=torch.Tensor)
    q: torch.Tensor = dataclasses.field(default_factory=torch.Tensor)
    heads: torch.Tensor = dataclasses.field(default_factory=torch.Tensor)


def forward(
    model: Model,
    cache: Cache,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embedded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Taps]:
    """Logits [B, V] of one token per row; writes its keys and values.

    In float32, rounded to bf16 where the kernel keeps activations. `embedded` [B, D] instead of the
    tokens' words.
    """
    taps = Taps()
    x = model.embedding[tokens.long()].float() if embedded is None else embedded
    for index, layer in enumerate(model.layers):
        normed = _normed(x, layer.norm)
        taps.act = _round(F.gelu(layer.fc1(normed), approximate="tanh"))
        q, k, v = layer.qkv(normed).view(len(tokens), 3, -1, HEAD_DIM).unbind(1)
        taps.q = _round(_rotate(model, q, positions))
        k, v = _round(_rotate(model, k, positions)), _round(v)
        heads = []
        for row, position in enumerate(positions.tolist()):
            page = int(cache.pages[row, position // PAGE])
            cache.keys[index, page, :, position % PAGE] = k[row].to(DTYPE)
            cache.values[index, page, :, position % PAGE] = v[row].to(DTYPE)
            heads.append(_attend(cache, index, row, position, taps.q[row]))
        taps.heads = _round(torch.stack(heads))
        x = _round(x + layer.fc2(taps.act) + layer.proj(taps.heads))
        taps.x.append(x)
    return model.head(_normed(x, model.norm)), taps


def _normed(x: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight, bias = norm
    return F.layer_norm(x, (x.shape[-1],), weight.float(), bias.float())


def _attend(cache: Cache, layer: int, row: int, position: int, q: torch.Tensor) -> torch.Tensor:
    pages = cache.pages[row, : position // PAGE + 1].long()
    k, v = (
        each[layer, pages].float().transpose(0, 1).flatten(1, 2)[:, : position + 1]
        for each in (cache.keys, cache.values)
    )
    weights = torch.softmax(torch.einsum("he,hpe->hp", q, k) / HEAD_DIM**0.5, dim=-1)
    return torch.einsum("hp,hpe->he", weights, v).flatten()


def _rotate(model: Model, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = ROTARY_DIM // 2
    c, s = model.cosines[positions.long()][:, None], model.sines[positions.long()][:, None]
    a, b = x[..., :half], x[..., half:ROTARY_DIM]
    return torch.cat([a * c - b * s, a * s + b * c, x[..., ROTARY_DIM:]], dim=-1)


def _round(x: torch.Tensor) -> torch.Tensor:
    return x.to(DTYPE).float()


def _norm(dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        1 + 0.1 * torch.randn(dim, device=device, dtype=DTYPE),
        0.1 * torch.randn(dim, device=device, dtype=DTYPE),
    )


# ---------------------------------------------------------------- values
# Encoders and decoders of values with random weights, and what they do in plain torch.
#
# Shape legend: B rows, D width, F frequencies, N bins of a decoder.


END, SCALAR, PAIR = 0, 5, 6
"""Token ids."""
_BINS = 1024  # of a value
_REACH = (32, 51)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of `values` values, as bins of a decoder; frequencies [values, F]."""

    token: int
    frequencies: torch.Tensor
    encoder: Linear
    fc1: Linear
    fc2: Linear

    @classmethod
    def random(
        cls, token: int, values: int, dim: int, inner_dim: int, device: torch.device
    ) -> Kind:
        frequencies = torch.randn(values, 128 * values, device=device, dtype=DTYPE)
        return cls(
            token,
            frequencies,
            Linear.random(dim, 256 * values, 1.4, device),
            Linear.random(inner_dim, dim, device=device),
            Linear.random(_BINS * values, inner_dim, 4.0, device),
        )

    def embed(self, payload_B2: torch.Tensor) -> torch.Tensor:
        """[B, D] float32, rounded to bf16."""
        count = len(self.frequencies)
        angle_BC = (2 * math.pi * payload_B2[:, :count].to(DTYPE).float()).to(DTYPE).float()
        phase_BF = (angle_BC @ self.frequencies.float()).to(DTYPE).float()
        features_B2F = torch.cat([phase_BF.cos(), phase_BF.sin()], dim=1).to(DTYPE)
        return self.encoder(features_B2F).to(DTYPE).float()

    def bins(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, N] float32, with inner activations rounded to bf16."""
        inner_BI = F.gelu(self.fc1(hidden_BD), approximate="tanh").to(DTYPE)
        return self.fc2(inner_BI)

    def packed(self, parts: int) -> tuple[ValueEncoder, DecoderWeights]:
        return (
            ValueEncoder(self.frequencies, Affine(self.encoder.weight, self.encoder.bias)),
            DecoderWeights(
                pack(self.fc1.weight), self.fc1.bias, pack(self.fc2.weight, parts), self.fc2.bias
            ),
        )


@dataclasses.dataclass(frozen=True)
class RandomValues:
    """Both kinds."""

    sizes: ValueSizes
    scalar: Kind
    pair: Kind

    @classmethod
    def random(
        cls, model: ModelSizes, device: torch.device = DEVICE, inner_dim: int = 0
    ) -> RandomValues:
        """`inner_dim`: by default four times the model's width, as Moondream 2's."""
        inner_dim = inner_dim or 4 * model.dim
        sizes = ValueSizes(
            dim=model.dim,
            inner_dim=inner_dim,
            scalar_features=128,
            pair_features=256,
            scalar_bins=_BINS,
            pair_bins=2 * _BINS,
            scalar_divisor=_BINS,
            scalar_token=SCALAR,
            pair_token=PAIR,
            end_token=END,
            scalar_reach=_REACH[0],
            pair_reach=_REACH[1],
            vocab=model.vocab_size,
        )
        kinds = (
            Kind.random(token, values, model.dim, inner_dim, device)
            for token, values in ((SCALAR, 1), (PAIR, 2))
        )
        return cls(sizes, *kinds)

    def two_layers(self) -> TwoLayerValues:
        parts = self.sizes.parts
        return TwoLayerValues(self.sizes, self.scalar.packed(parts), self.pair.packed(parts))

    def embed(
        self, words_VD: torch.Tensor, token_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B, D] float32."""
        x_BD = words_VD[token_B.long()].float()
        for kind in (self.scalar, self.pair):
            x_BD = torch.where((token_B == kind.token)[:, None], kind.embed(payload_B2), x_BD)
        return x_BD
