"""Decode step of a decoder with tau gains and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from legato_engine.kernels.cuda import capability, skinny_gemm
from legato_engine.kernels.cuda.adapters import LowRankMaps
from legato_engine.kernels.cuda.attention import MAX_TOKENS, SPLITS, StepPositions
from legato_engine.kernels.cuda.attention import shared_bytes as attention_shared
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    DecoderSizes,
    HeadWeights,
    Part,
    Stages,
    StepCache,
    StepDecoder,
    fitting_stages,
)
from legato_engine.kernels.cuda.module import Kernel, Module
from legato_engine.kernels.map_codes import GROUP, WeightKind
from legato_engine.kernels.parameters import (
    ExpertMap,
    ExpertSlots,
    ExpertWeights,
    LayerWeights,
    TauWeights,
)

MAX_EXPERTS = 64
MAX_ACTIVE = 8

_BUDGET = 221 * 1024  # bytes of shared memory, which leave room for those of `gains`
_SPLIT_TOKENS = 2  # whose attention is split on an H200 and leaves room for the experts' kernels
_BESIDE = 6 * 1024  # left of a smaller GPU's
_MOST_STAGES, _FEWEST_STAGES = 6, 2  # the former with a head's map in bf16
_UP_INPUTS, _OUT_INPUTS = 2048, 1024
"""Inputs of a stage of packed rows, at most; 8 tokens' own are beside the latter."""
_INPUT_STAGES = 3
"""Stages of inputs of `experts_out`, of a tile each."""

_TERM = 16 * 4  # bytes of a pair in a thread block of `experts_out`


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`weight_kind` is of `EXPERT_KINDS` or bf16."""

    num_experts: int
    num_active: int
    inner_dim: int
    weight_kind: WeightKind

    @property
    def is_packed(self) -> bool:
        return self.weight_kind is WeightKind.INT4

    @property
    def has_row_scales(self) -> bool:
        return self.weight_kind in (WeightKind.E4M3, WeightKind.INT8)


@dataclasses.dataclass(frozen=True, slots=True)
class TauSizes:
    """Constants of the kernels; `exact` selects the gains' gelu."""

    decoder: DecoderSizes
    experts: ExpertSizes
    exact: bool


def supported(tau: TauSizes) -> bool:
    sizes = tau.experts
    return (
        sizes.num_experts % 16 == 0
        and sizes.num_active <= sizes.num_experts <= MAX_EXPERTS
        and sizes.num_active <= MAX_ACTIVE
        and sizes.inner_dim % GROUP == 0
        and max_tokens(tau) > 0
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TauRows:
    """Rows of `width` weights in a stage of `row_major_gemm.cuh`, of at most `packed` inputs.

    Without it they are row-major.
    """

    width: int
    kind: WeightKind
    packed: int = 0

    @property
    def chunk(self) -> int:
        if self.packed:
            run = skinny_gemm.chunk(self.width)
            runs, most = self.width // run, self.packed // run
            return next(run * each for each in range(most, 0, -1) if runs % each == 0)
        most = 2048 // self._size // GROUP
        return next(g * GROUP for g in range(most, 0, -1) if self.width % (g * 64) == 0)

    @property
    def together(self) -> int:
        if self.chunk < self.width:
            return 1
        return 2 if self.chunk * self._size > 1024 else 4

    @property
    def stage(self) -> int:
        """Bytes of 16 rows, each copy of row-major ones followed by a gap."""
        if self.packed:
            return self.kind.stage_bytes(self.chunk)
        return 16 // self.together * (self.together * self.chunk * self._size + 64)

    @property
    def padding(self) -> int:
        return 8 if self._size == 1 and not self.packed else skinny_gemm.PAD

    @property
    def _size(self) -> int:
        return self.kind.bits // 8


def up_stages(sizes: TauSizes, batch: int) -> tuple[int, int]:
    """Return the stages that fit beside inputs and sums, and the bytes of shared memory."""
    rows = up_rows(sizes)
    inputs = skinny_gemm.ring(batch * (rows.width + rows.padding), 1)
    return _stages(sizes, batch, rows.stage, inputs + _sums(sizes, batch))


def up_rows(sizes: TauSizes) -> TauRows:
    experts = sizes.experts
    packed = _UP_INPUTS if experts.is_packed else 0
    return TauRows(sizes.decoder.dim, experts.weight_kind, packed)


def out_rows(sizes: TauSizes) -> tuple[TauRows, TauRows]:
    """Return those of the experts' second map and of the heads' map."""
    experts, kind = sizes.experts, sizes.decoder.weight_kind
    packed = _OUT_INPUTS if experts.is_packed else 0
    down = TauRows(experts.inner_dim, experts.weight_kind, packed)
    return down, TauRows(sizes.decoder.dim, kind, 0 if kind is WeightKind.BF16 else _OUT_INPUTS)


def out_stages(sizes: TauSizes, batch: int) -> tuple[int, int]:
    """Return the stages of the output maps, in memory left by a ring of inputs, sums and terms."""
    experts, tiles = sizes.experts, skinny_gemm.tiles_for(batch)
    down, proj = out_rows(sizes)
    inputs = max(rows.chunk + rows.padding for rows in (down, proj))
    beside = skinny_gemm.ring(min(batch, 8) * inputs, _INPUT_STAGES) + _sums(sizes, batch)
    terms = 8 * tiles * (experts.num_active + 1) * _TERM
    return _stages(sizes, batch, max(down.stage, proj.stage), beside + terms)


def _sums(sizes: TauSizes, batch: int) -> int:
    """Bytes of `Blocks` and `RowsOfScales` in experts.cu."""
    experts, few = sizes.experts, skinny_gemm.tiles_for(batch) == 1
    scales = experts.num_experts * 16 * 4 if experts.has_row_scales else 0
    return skinny_gemm.block_sums(8, 2 if few else 4) + scales


def budget(batch: int) -> int:
    """Bytes of shared memory of the experts' kernels; for few tokens attention fits beside them."""
    most = min(_BUDGET, capability.current_gpu().shared - _BESIDE)
    if batch > _SPLIT_TOKENS or skinny_gemm.clusters() == 1:
        return most
    return most - attention_shared(SPLITS[-1], DEFAULT_STAGES.attend_split, batch)


def max_tokens(sizes: TauSizes) -> int:
    """Tokens of a launch that leave room for two stages; 0 if not even a few do."""
    fits = [
        8 * tiles
        for tiles in skinny_gemm.TILES
        if min(up_stages(sizes, 8 * tiles)[0], out_stages(sizes, 8 * tiles)[0]) >= _FEWEST_STAGES
    ]
    return max(fits, default=0)


def _stages(sizes: TauSizes, batch: int, num_bytes: int, beside: int) -> tuple[int, int]:
    most = _MOST_STAGES * 16 // sizes.decoder.weight_kind.bits
    stages = min(most, (budget(batch) - beside - skinny_gemm.ring(0, most)) // num_bytes)
    return stages, skinny_gemm.ring(num_bytes // 2, stages) + beside


def tau_defines(sizes: TauSizes, tiles: int, *, routed: bool) -> dict[str, int]:
    decoder = sizes.decoder
    return {
        "DIM": decoder.dim,
        "FF": decoder.ff_dim,
        "HEADS": decoder.num_heads,
        "ROTARY": decoder.rotary_dim,
        "PAGE": decoder.page_size,
        "PAGES": decoder.max_pages,
        "EXACT": int(sizes.exact),
        "EXPERTS": sizes.experts.num_experts if routed else 0,
        "EXPERT_WEIGHTS": int(sizes.experts.weight_kind),
        "WEIGHTS": int(decoder.weight_kind),
        "KV_BYTES": decoder.kv_bytes,
        "TILES": tiles,
    }


def expert_defines(sizes: TauSizes, tiles: int) -> dict[str, int]:
    experts = sizes.experts
    return {
        "DIM": sizes.decoder.dim,
        "INNER": experts.inner_dim,
        "EXPERTS": experts.num_experts,
        "ACTIVE": experts.num_active,
        "EXPERT_WEIGHTS": int(experts.weight_kind),
        "WEIGHTS": int(sizes.decoder.weight_kind),
        "MIXED": sizes.decoder.mixed_dim,
        "INPUT_STAGES": _INPUT_STAGES,
        "TILES": tiles,
    }


# ---------------------------------------------------------------- expert adapters

# Low-rank adapters of a decode step's experts: B(A x) of each token's own slot.
#
# Shape legend as in `tau_decoder`; S slots, Q ranks of a slot for one expert, O outputs.

_OUTPUTS = 64  # of a thread block of `expert_expand`
_TOKENS = 16  # thread blocks of `expert_expand` along the tokens, at most
_WAVE = 3  # concurrent thread blocks of `expert_shrink` on a multiprocessor


_Change = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""A map's change, the slots of rows and the tokens' rows, as experts' kernels read them."""

_Where = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""The tokens' experts [B, K], which a kernel chooses; the slot of each row; the tokens' rows."""


class ExpertLowRank:
    """The kernels over the slots of all layers, and their scratch memory; steps must not overlap.

    A layer's changes are `first`, between router and experts, `shrink` after the first map, and
    `second` before the second map.
    """

    def __init__(
        self,
        dim: int,
        experts: ExpertSizes,
        layers: Mapping[int, ExpertSlots],
        rank_S: torch.Tensor,
        capacity: int,
    ) -> None:
        """`rank_S`: the slots' own ranks for one expert, up to `capacity`."""
        outputs, device = 2 * experts.inner_dim, rank_S.device
        self._layers, self._rank_S = layers, rank_S
        self._shrinks, self._expands = {}, {}
        for first, inputs, made in ((True, dim, outputs), (False, experts.inner_dim, dim)):
            sizes = expert_adapter_defines(experts, capacity, first=first)
            shrink = Module("expert_adapters.cu", {**sizes, "WIDTH": inputs})
            expand = Module("expert_adapters.cu", {**sizes, "OUTPUTS": made})
            self._shrinks[first] = shrink.kernel("expert_shrink")
            self._expands[first] = expand.kernel("expert_expand")
        self._threads, self._room = 32 * experts.num_active, capacity
        pairs = MAX_TOKENS, experts.num_active
        self._low_BKQ = torch.zeros(*pairs, capacity, device=device)
        self._first_BKO = torch.zeros(*pairs, outputs, device=device)
        self._second_BD = torch.zeros(MAX_TOKENS, dim, device=device)

    def first(
        self, layer: int, x_BD: torch.Tensor, logits_BX: torch.Tensor, where: _Where
    ) -> _Change:
        """Compute the first map's change for each pair, of experts chosen by `logits_BX`."""
        up = self._layers[layer].up
        self._shrink(x_BD, logits_BX, up, where)
        return self._expand(None, up, where)

    def shrink(self, layer: int, inner_BKI: torch.Tensor, where: _Where) -> None:
        """Multiply by A of the second map."""
        self._shrink(inner_BKI, None, self._layers[layer].down, where)

    def second(self, layer: int, share_BK: torch.Tensor, where: _Where) -> _Change:
        """Compute the second map's change, summed by `share_BK`."""
        return self._expand(share_BK, self._layers[layer].down, where)

    def _shrink(
        self,
        x: torch.Tensor,
        logits_BX: torch.Tensor | None,
        change: ExpertMap,
        where: _Where,
    ) -> None:
        """Multiply tokens [B, D] by A, or pairs [B, K, I] without `logits_BX`."""
        expert_BK, slot_R, row_B = where
        batch = len(row_B)
        wave = max(1, skinny_gemm.num_processors() * _WAVE // batch)
        self._shrinks[logits_BX is not None].launch(
            (min(self._room, wave), batch, 1),
            self._threads,
            (
                *(x, logits_BX, change.a_SXRI, self._rank_S, slot_R, row_B),
                *(expert_BK, self._low_BKQ, batch),
            ),
            overlap=True,
        )

    def _expand(self, share_BK: torch.Tensor | None, change: ExpertMap, where: _Where) -> _Change:
        expert_BK, slot_R, row_B = where
        out, batch = self._first_BKO if share_BK is None else self._second_BD, len(row_B)
        self._expands[share_BK is None].launch(
            (out.shape[-1] // _OUTPUTS, min(batch, _TOKENS), 1),
            self._threads,
            (
                *(self._low_BKQ, expert_BK, share_BK, change.b_SXRO),
                *(self._rank_S, slot_R, row_B, out, batch),
            ),
            overlap=True,
        )
        return out, slot_R, row_B


def expert_adapter_defines(experts: ExpertSizes, capacity: int, *, first: bool) -> dict[str, int]:
    return {
        "EXPERTS": experts.num_experts,
        "ACTIVE": experts.num_active,
        "EXPERT_WEIGHTS": int(experts.weight_kind),
        "FIRST": int(first),
        "RANKS": capacity,
    }


# ---------------------------------------------------------------- tau decoder

# A decode step of a decoder with gains on queries and values, and experts in most layers.
#
# Experts' first half runs before the gains, their second half in the output map. Only those that a
# token chose are read; their weights are in the checkpoint's layout, but packed in int4.
#
# Shape legend as in `decoder`; X experts, K experts of a token, I inner width of an expert, Z = 2 H
# gains, C = 3 D queries, keys and values.

_GAIN_TOKENS = 8  # of a thread block of `gains`
_NO_CHANGE: _Change = None, None, None
_ROWS = 8  # pairs of rows of an expert's first map, a thread block of `experts_up`


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Experts, and what they read: the inputs of the layer's first map by its own `norm`."""

    norm: tuple[torch.Tensor, torch.Tensor]
    up: ExpertWeights
    down: ExpertWeights


@dataclasses.dataclass(frozen=True, slots=True)
class TauLayer:
    """Gains and maps; the rows of the first map are in their own order.

    With `experts` the first map has the router in place of fc1, and the output map, in the
    checkpoint's layout if it is bf16, no fc2.
    """

    gains: TauWeights
    maps: LayerWeights
    experts: ExpertLayer | None


class _Kernels:
    def __init__(self, sizes: TauSizes, tiles: int, stages: Stages) -> None:
        most = 8 * tiles
        self.in_stages = stages.layer_in[tiles]
        dim, kind = sizes.decoder.dim, sizes.decoder.weight_kind
        shared = skinny_gemm.whole_shared(dim, most, self.in_stages, kind, rounds=1)
        self.tau_in: dict[bool, Kernel] = {}
        for routed in (False, True):
            module = Module("tau_layer.cu", tau_defines(sizes, tiles, routed=routed))
            self.tau_in[routed] = module.kernel("tau_in", shared=shared)
            self.gains = module.kernel("gains")
        module = Module("experts.cu", expert_defines(sizes, tiles))
        self.up = module.kernel("experts_up", shared=budget(most))
        self.out = module.kernel("experts_out", shared=budget(most))


class TauDecoder(StepDecoder):
    """A decoder with gains.

    `expert_LBK` (int32) are the experts that the last step chose, likeliest first; layers without
    experts do not write theirs.
    """

    parts = tuple(Part)
    expert_LBK: torch.Tensor

    def __init__(
        self,
        sizes: TauSizes,
        layers: Sequence[TauLayer],
        head: HeadWeights,
        cache: StepCache,
        stages: Stages = DEFAULT_STAGES,
        adapters: LowRankMaps | None = None,
        expert_adapters: ExpertLowRank | None = None,
    ) -> None:
        super().__init__(sizes.decoder, head, cache, stages, adapters)
        self._tau, self._layers, self._expert_adapters = sizes, layers, expert_adapters
        stages = fitting_stages(sizes.decoder, stages, rounds=1)
        most = min(self.max_tokens, skinny_gemm.most_tokens(stages.layer_in))
        self.max_tokens = min(most, max_tokens(sizes))
        tiles = skinny_gemm.tiles_up_to(self.max_tokens)
        self._kernels = {each: _Kernels(sizes, each, stages) for each in tiles}
        dim, experts = sizes.decoder.dim, sizes.experts
        pairs = MAX_TOKENS, experts.num_active

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=cache.cos_PR.device)

        self._qkv_BC = zeros(MAX_TOKENS, 3 * dim)
        self._features_BC = zeros(MAX_TOKENS, 3 * dim)
        self._normed_BD = zeros(MAX_TOKENS, dim)
        self._inner_BKI = zeros(*pairs, experts.inner_dim)
        self._logits_BX = zeros(MAX_TOKENS, experts.num_experts, dtype=torch.float32)
        self.expert_LBK = zeros(len(layers), *pairs, dtype=torch.int32)
        self._share_LBK = zeros(len(layers), *pairs, dtype=torch.float32)

    def layers(
        self,
        x_BD: torch.Tensor,
        positions: StepPositions,
        parts: Collection[Part] = tuple(Part),
        slot_R: torch.Tensor | None = None,
    ) -> None:
        """See `CudaDecoder.layers`."""
        assert slot_R is None or self._expert_adapters is not None, "adapters need a bank"
        for layer, weights in enumerate(self._layers):
            if weights.experts is not None:
                self._routed_layer(x_BD, layer, weights, positions, parts, slot_R)
                continue
            change_BF = self._inner_change(layer, x_BD, slot_R, positions.row_B)
            if Part.LAYER_IN in parts:
                self._layer_in(x_BD, weights, change_BF)
            self._gain_and_attend(layer, weights.gains, positions, parts, follows_experts=False)
            change_BD = self._outer_change(layer, slot_R, positions.row_B)
            if Part.LAYER_OUT in parts:
                self._layer_out(x_BD, weights.maps, change_BD)

    def _routed_layer(
        self,
        x_BD: torch.Tensor,
        layer: int,
        weights: TauLayer,
        positions: StepPositions,
        parts: Collection[Part],
        slot_R: torch.Tensor | None,
    ) -> None:
        """Place adapters' kernels where the GPU has time.

        The experts' first map needs its change only at its first sums, A of the second map runs
        beside the gains, and B beside attention.
        """
        adapters = None if slot_R is None else self._expert_adapters
        where = self.expert_LBK[layer], slot_R, positions.row_B
        if Part.LAYER_IN in parts:
            self._layer_in(x_BD, weights, None)
        if Part.EXPERTS in parts:
            change = _NO_CHANGE
            if adapters is not None:
                change = adapters.first(layer, self._normed_BD, self._logits_BX, where)
            self._experts_up(len(x_BD), layer, weights, change)
            if adapters is not None:
                adapters.shrink(layer, self._inner_BKI, where)
        self._gain_and_attend(layer, weights.gains, positions, parts, follows_experts=True)
        if Part.LAYER_OUT in parts:
            change = _NO_CHANGE
            if adapters is not None:
                change = adapters.second(layer, self._share_LBK[layer], where)
            self._experts_out(x_BD, layer, weights, change)

    def _layer_in(
        self, x_BD: torch.Tensor, weights: TauLayer, change_BF: torch.Tensor | None
    ) -> None:
        batch, sizes, maps, experts = x_BD.shape[0], self._sizes, weights.maps, weights.experts
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        norm = (x_BD, x_BD) if experts is None else experts.norm  # the former is not read
        kernels.tau_in[experts is not None].launch(
            (skinny_gemm.even_grid(len(maps.folded_in) // 16), 1, 1),
            skinny_gemm.finishing_threads(1),
            (
                *(x_BD, maps.weights_in, maps.scales_in, maps.folded_in, *norm),
                *(self._qkv_BC, self._features_BC, self._mixed_BF),
                *(self._logits_BX, self._normed_BD, change_BF, batch, kernels.in_stages),
            ),
            shared=skinny_gemm.whole_shared(
                sizes.dim, batch, kernels.in_stages, sizes.weight_kind, rounds=1
            ),
            overlap=True,
        )

    def _gain_and_attend(
        self,
        layer: int,
        gains: TauWeights,
        positions: StepPositions,
        parts: Collection[Part],
        *,
        follows_experts: bool,
    ) -> None:
        """`follows_experts` if other kernels ran since the first."""
        batch, cache = len(positions.row_B), self._cache
        if Part.GAINS in parts:
            self._kernels[skinny_gemm.tiles_for(batch)].gains.launch(
                (self._sizes.num_heads, -(-batch // _GAIN_TOKENS), 1),
                skinny_gemm.WORKERS,
                (
                    *(self._qkv_BC, self._features_BC, gains.weight_ZC, gains.position_PH),
                    *(*cache.places(positions), self._q_BD, *cache.layer(layer)),
                    *(batch, int(follows_experts)),
                ),
                overlap=True,
            )
        if Part.ATTEND in parts:
            self._attend(positions, layer)

    def _experts_up(self, batch: int, layer: int, weights: TauLayer, change: _Change) -> None:
        assert weights.experts is not None, "a layer without experts"
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        stages, shared = up_stages(self._tau, batch)
        kernels.up.launch(
            (self._tau.experts.inner_dim // _ROWS, 1, 1),
            skinny_gemm.THREADS,
            (
                *(self._normed_BD, self._logits_BX, *_weights(weights.experts.up)),
                self._inner_BKI,
                *(self.expert_LBK[layer], self._share_LBK[layer], *change, batch, stages),
            ),
            shared=shared,
            overlap=True,
        )

    def _experts_out(
        self, x_BD: torch.Tensor, layer: int, weights: TauLayer, change: _Change
    ) -> None:
        assert weights.experts is not None, "a layer without experts"
        batch, maps = x_BD.shape[0], weights.maps
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        stages, shared = out_stages(self._tau, batch)
        kernels.out.launch(
            (self._sizes.dim // 16, 1, 1),
            skinny_gemm.THREADS,
            (
                *(self._inner_BKI, self.expert_LBK[layer], self._share_LBK[layer]),
                *(self._heads_BD, *_weights(weights.experts.down)),
                *(maps.weights_out, maps.scales_out, maps.proj_bias),
                *(x_BD, *change, batch, stages),
            ),
            shared=shared,
            overlap=True,
        )


def _weights(layer: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights without scales of rows pass as their own, which are not read."""
    weights = layer.weight_XOI if layer.packed is None else layer.packed.data
    return weights, weights if layer.scale_XO is None else layer.scale_XO
