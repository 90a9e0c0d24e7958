"""Weights of a decoder, as its checkpoint stores them or packed for decode steps."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch

E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """`values` e4m3 [..., K]; multiplied by `scale`, float32 [..., 1], they are the row."""

    values: torch.Tensor
    scale: torch.Tensor


# ---------------------------------------------------------------- experts


class PackedExperts(Protocol):
    """A map of every expert as the decode step's kernels read it."""

    data: torch.Tensor

    def dense(self, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        """Return a copy of all experts, [X, O, I], or of one, [O, I]."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One bias-free map of every expert: the model's dtype, or 8 bits with a scale for each row.

    Of `packed` weights `weight_XOI` is empty, without inputs.
    """

    weight_XOI: torch.Tensor
    scale_XO: torch.Tensor | None
    packed: PackedExperts | None = None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all experts in a dtype, still to be multiplied by the scales of rows."""
        return self.weight_XOI.to(dtype) if self.packed is None else self.packed.dense(dtype)

    def one(self, dtype: torch.dtype, expert: int) -> torch.Tensor:
        """Return one of them, likewise."""
        if self.packed is not None:
            return self.packed.dense(dtype, expert)
        return self.weight_XOI[expert].to(dtype)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The K experts of each token (int64), and their shares in the model's dtype."""

    expert_TK: torch.Tensor
    share_TK: torch.Tensor


# ---------------------------------------------------------------- low rank

# Shape legend: T tokens, S slots, X experts, R ranks, I and O a map's inputs and outputs.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapter slot of each token, or one of all tokens; int64, slot 0 is none.

    `rank_S` are the slots' own ranks. `rank`, at least that of every slot named, is known on the
    host because shapes depend on it.
    """

    slot_T: torch.Tensor
    rank_S: torch.Tensor
    rank: int


class LowRankMap(NamedTuple):
    """A layer's slots for one map: B(A x) is added to the map's result."""

    a_SRI: torch.Tensor
    b_SRO: torch.Tensor


class LowRankStack(NamedTuple):
    """The slots of one map in all L layers; an adapter's own tensors lack S."""

    a_LSRI: torch.Tensor
    b_LSRO: torch.Tensor


class ExpertMap(NamedTuple):
    """The same of every expert."""

    a_SXRI: torch.Tensor
    b_SXRO: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpSlots:
    """A layer's slots for its MLP, and the norm that it reads."""

    norm: Affine
    fc1: LowRankMap
    fc2: LowRankMap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertSlots:
    """A layer's slots for its experts; ranks are those of one expert."""

    up: ExpertMap
    down: ExpertMap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """A layer's expert adapters and the tokens that read them."""

    up: ExpertMap
    down: ExpertMap
    rows: AdapterRows


# ---------------------------------------------------------------- parameters

# Shape legend: D width, H heads, O outputs, I inputs, P positions, Z = 2 H gains, C = 3 D queries,
# keys and values.


class Affine(NamedTuple):
    """A linear map [O, I] or a norm's scale [D], and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DenseMlp:
    """`fc2(gelu(fc1(x)))`."""

    fc1: Affine
    fc2: Affine


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertMlp:
    """A router and its experts; see `ops.experts`."""

    router: Affine
    up: ExpertWeights
    down: ExpertWeights


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TauWeights:
    """Gains on queries and values: a map of the token, bf16, and the position's part, float32."""

    weight_ZC: torch.Tensor
    position_PH: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a layer: packed maps, with the norm folded into the first.

    Tensors are bf16 except `folded_in` and the scales of rows (some weight kinds only): float32. A
    layer with experts has no `fc2_bias`.
    """

    weights_in: torch.Tensor
    folded_in: torch.Tensor
    weights_out: torch.Tensor
    proj_bias: torch.Tensor
    fc2_bias: torch.Tensor | None
    scales_in: torch.Tensor | None = None
    scales_out: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A layer whose attention and MLP read the same norm and are added to the residual stream."""

    norm: Affine
    qkv: Affine
    proj: Affine
    mlp: DenseMlp | ExpertMlp
    tau: TauWeights | None = None
    packed: LayerWeights | None = None  # which the other weights, but the norm, are part of
