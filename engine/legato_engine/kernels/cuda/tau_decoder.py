"""A decode step of a decoder with gains on queries and values, and experts in most layers.

Experts' first half runs before the gains, their second half in the output map. Their weights are in
the checkpoint's layout; only those that a token chose are read.

Shape legend as in `decoder`; X experts, K experts of a token, I inner width of an expert, Z = 2 H
gains, C = 3 D queries, keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.adapters import StepAdapters
from legato_engine.kernels.cuda.attention import MAX_TOKENS, StepPositions
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    Decoder,
    Part,
    Stages,
)
from legato_engine.kernels.cuda.decoder_sizes import LayerWeights
from legato_engine.kernels.cuda.expert_adapters import LayerChanges, RoutedAdapters
from legato_engine.kernels.cuda.head import HeadWeights
from legato_engine.kernels.cuda.module import Kernel, Module
from legato_engine.kernels.cuda.tau_decoder_stages import (
    BUDGET,
    TauSizes,
    expert_defines,
    out_stages,
    tau_defines,
    up_stages,
)
from legato_engine.kernels.experts import ExpertWeights
from legato_engine.kernels.parameters import TauWeights

_GAIN_TOKENS = 8  # of a thread block of `gains`
_NO_CHANGE = None, None, None
_ROWS = 8  # pairs of rows of an expert's first map, a thread block of `experts_up`


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer with experts; first map and router are packed as one with the norm folded in."""

    weights_in: torch.Tensor
    folded_in: torch.Tensor
    norm: tuple[torch.Tensor, torch.Tensor]
    up: ExpertWeights
    down: ExpertWeights
    proj_DD: torch.Tensor
    proj_bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TauLayer:
    """Gains and maps; the rows of the first map are in their own order."""

    gains: TauWeights
    maps: LayerWeights | ExpertLayer


_Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
_Where = tuple[StepPositions, _Cache, tuple[torch.Tensor, torch.Tensor]]
"""A layer's positions; its keys, values and their units; and the angles."""


class _Kernels:
    def __init__(self, sizes: TauSizes, tiles: int, stages: Stages) -> None:
        most = 8 * tiles
        self.in_stages = stages.layer_in[tiles]
        shared = skinny_gemm.whole_shared(sizes.decoder.dim, most, self.in_stages)
        self.tau_in: dict[bool, Kernel] = {}
        for routed in (False, True):
            module = Module("tau_layer.cu", tau_defines(sizes, tiles, routed=routed))
            self.tau_in[routed] = module.kernel("tau_in", shared=shared)
            self.gains = module.kernel("gains")
        module = Module("experts.cu", expert_defines(sizes, tiles))
        self.up = module.kernel("experts_up", shared=BUDGET)
        self.out = module.kernel("experts_out", shared=BUDGET)


class TauDecoder:
    """The kernels and their scratch memory; steps share it and must not overlap.

    `expert_LBK` (int32) are the experts that the last step chose, likeliest first; layers without
    experts do not write theirs.
    """

    parts = tuple(Part)

    def __init__(
        self,
        sizes: TauSizes,
        num_layers: int,
        device: torch.device,
        stages: Stages = DEFAULT_STAGES,
        scale_L2: torch.Tensor | None = None,
    ) -> None:
        """`scale_L2`: float32 units of keys and of values in e4m3."""
        self._sizes = sizes
        self._scales = [None] * num_layers if scale_L2 is None else [*scale_L2]
        self._decoder = Decoder(sizes.decoder, device, stages)
        self._kernels = {tiles: _Kernels(sizes, tiles, stages) for tiles in skinny_gemm.TILES}
        dim, experts = sizes.decoder.dim, sizes.experts
        pairs = MAX_TOKENS, experts.num_active

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._qkv_BC = zeros(MAX_TOKENS, 3 * dim)
        self._features_BC = zeros(MAX_TOKENS, 3 * dim)
        self._normed_BD = zeros(MAX_TOKENS, dim)
        self._inner_BKI = zeros(*pairs, experts.inner_dim)
        self._logits_BX = zeros(MAX_TOKENS, experts.num_experts, dtype=torch.float32)
        self.expert_LBK = zeros(num_layers, *pairs, dtype=torch.int32)
        self._share_LBK = zeros(num_layers, *pairs, dtype=torch.float32)

    def head(self, x_BD: torch.Tensor, weights: HeadWeights, logits_BV: torch.Tensor) -> None:
        self._decoder.head(x_BD, weights, logits_BV)

    def layers(
        self,
        x_BD: torch.Tensor,
        layers: Sequence[TauLayer],
        positions: StepPositions,
        k_LNHSE: torch.Tensor,
        v_LNHSE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        parts: Collection[Part] = tuple(Part),
        adapters: StepAdapters | None = None,
    ) -> None:
        """As `Decoder.layers`; adapters are `RoutedAdapters`."""
        assert adapters is None or isinstance(adapters, RoutedAdapters), "of another decoder"
        row_B = positions.row_B
        for layer, weights in enumerate(layers):
            cache = k_LNHSE[layer], v_LNHSE[layer], self._scales[layer]
            where = positions, cache, angles
            if isinstance(weights.maps, ExpertLayer):
                changes = None
                if adapters is not None:
                    changes = adapters.experts(layer, self.expert_LBK[layer], row_B)
                self._routed_layer(x_BD, layer, weights.gains, weights.maps, where, parts, changes)
                continue
            change_BF = None if adapters is None else adapters.inner(layer, x_BD, row_B)
            if Part.LAYER_IN in parts:
                self._layer_in(x_BD, weights.maps, change_BF)
            self._attention(len(x_BD), weights.gains, where, parts, follows_experts=False)
            mixed_BF, change_BD = self._decoder.mixed_BF, None
            if adapters is not None:
                change_BD = adapters.outer(layer, mixed_BF, row_B)
            if Part.LAYER_OUT in parts:
                self._decoder.layer_out(x_BD, weights.maps, change_BD)

    def _routed_layer(
        self,
        x_BD: torch.Tensor,
        layer: int,
        gains: TauWeights,
        maps: ExpertLayer,
        where: _Where,
        parts: Collection[Part],
        changes: LayerChanges | None,
    ) -> None:
        """Place adapters' kernels where the GPU has time.

        The experts' first map needs its change only at its first sums, A of the second map runs
        beside the gains, and B beside attention.
        """
        if Part.LAYER_IN in parts:
            self._layer_in(x_BD, maps, None)
        if Part.EXPERTS in parts:
            if changes is not None:
                changes.first(self._normed_BD, self._logits_BX)
            self._experts_up(len(x_BD), layer, maps, changes)
            if changes is not None:
                changes.shrink(self._inner_BKI)
        self._attention(len(x_BD), gains, where, parts, follows_experts=True)
        if Part.LAYER_OUT in parts:
            if changes is not None:
                changes.expand(self._share_LBK[layer])
            self._experts_out(x_BD, layer, maps, changes)

    def _attention(
        self,
        batch: int,
        gains: TauWeights,
        where: _Where,
        parts: Collection[Part],
        *,
        follows_experts: bool,
    ) -> None:
        """`follows_experts` if other kernels ran since the first."""
        positions, cache, _ = where
        if Part.GAINS in parts:
            self._gain(batch, gains, where, follows_experts=follows_experts)
        if Part.ATTEND in parts:
            self._decoder.attend(positions, *cache)

    def _layer_in(
        self,
        x_BD: torch.Tensor,
        maps: LayerWeights | ExpertLayer,
        change_BF: torch.Tensor | None,
    ) -> None:
        batch, sizes = x_BD.shape[0], self._sizes.decoder
        routed = isinstance(maps, ExpertLayer)
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        more = self._sizes.experts.num_experts if routed else sizes.ff_dim
        norm = maps.norm if isinstance(maps, ExpertLayer) else (x_BD, x_BD)  # which is not read
        kernels.tau_in[routed].launch(
            (skinny_gemm.even_grid((3 * sizes.dim + more) // 16), 1, 1),
            skinny_gemm.FINISHING,
            (
                *(x_BD, maps.weights_in, maps.folded_in, *norm),
                *(self._qkv_BC, self._features_BC, self._decoder.mixed_BF),
                *(self._logits_BX, self._normed_BD, change_BF, batch, kernels.in_stages),
            ),
            shared=skinny_gemm.whole_shared(sizes.dim, batch, kernels.in_stages),
            overlap=True,
        )

    def _gain(self, batch: int, gains: TauWeights, where: _Where, *, follows_experts: bool) -> None:
        positions, cache, angles = where
        self._kernels[skinny_gemm.tiles_for(batch)].gains.launch(
            (self._sizes.decoder.num_heads, -(-batch // _GAIN_TOKENS), 1),
            skinny_gemm.WORKERS,
            (
                *(self._qkv_BC, self._features_BC, gains.weight_ZC, gains.position_PH, *angles),
                *(positions.row_B, positions.position_B, positions.table_RM),
                *(self._decoder.q_BD, *cache, batch, int(follows_experts)),
            ),
            overlap=True,
        )

    def _experts_up(
        self, batch: int, layer: int, maps: ExpertLayer, changes: LayerChanges | None
    ) -> None:
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        stages, shared = up_stages(self._sizes, batch)
        kernels.up.launch(
            (self._sizes.experts.inner_dim // _ROWS, 1, 1),
            skinny_gemm.THREADS,
            (
                *(self._normed_BD, self._logits_BX, *_weights(maps.up), self._inner_BKI),
                *(self.expert_LBK[layer], self._share_LBK[layer]),
                *(_NO_CHANGE if changes is None else changes.of_first),
                *(batch, stages),
            ),
            shared=shared,
            overlap=True,
        )

    def _experts_out(
        self, x_BD: torch.Tensor, layer: int, maps: ExpertLayer, changes: LayerChanges | None
    ) -> None:
        batch = x_BD.shape[0]
        kernels = self._kernels[skinny_gemm.tiles_for(batch)]
        stages, shared = out_stages(self._sizes, batch)
        kernels.out.launch(
            (self._sizes.decoder.dim // 16, 1, 1),
            skinny_gemm.THREADS,
            (
                *(self._inner_BKI, self.expert_LBK[layer], self._share_LBK[layer]),
                *(self._decoder.heads_BD, *_weights(maps.down), maps.proj_DD, maps.proj_bias),
                *(x_BD, *(_NO_CHANGE if changes is None else changes.of_second), batch, stages),
            ),
            shared=shared,
            overlap=True,
        )


def _weights(layer: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights pass as their own scales, which are not read."""
    scale_XO = layer.scale_XO
    return layer.weight_XOI, layer.weight_XOI if scale_XO is None else scale_XO
