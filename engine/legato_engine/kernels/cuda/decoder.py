"""Decode step of a decoder with parallel attention and MLP."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from legato_engine.kernels.cuda import capability, skinny_gemm
from legato_engine.kernels.cuda.adapters import LowRankMaps
from legato_engine.kernels.cuda.attention import (
    HEAD_DIM,
    MAX_CONTEXT,
    MAX_TOKENS,
    TILE,
    AttentionSizes,
    PagedAttention,
    StepPositions,
)
from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import Kernel, Module
from legato_engine.kernels.map_codes import GROUP, WeightKind
from legato_engine.kernels.parameters import LayerWeights


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Constants of the kernels; `kv_bytes` per element: 2 (bf16) or 1 (e4m3)."""

    dim: int
    ff_dim: int
    num_heads: int
    rotary_dim: int
    vocab_size: int
    page_size: int
    max_pages: int
    kv_bytes: int = 2
    weight_kind: WeightKind = WeightKind.BF16
    head_kind: WeightKind = WeightKind.BF16

    @property
    def mixed_dim(self) -> int:
        """The inner activations, then the heads."""
        return self.dim + self.ff_dim

    @property
    def attention(self) -> AttentionSizes:
        return AttentionSizes(
            num_heads=self.num_heads,
            page_size=self.page_size,
            max_pages=self.max_pages,
            out_stride=self.mixed_dim,
            kv_bytes=self.kv_bytes,
        )

    @property
    def parts(self) -> int:
        """Parts of the inputs of a layer's output map."""
        return skinny_gemm.num_parts(self.mixed_dim, self.dim)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepCache:
    """A step's keys and values, and its rotations, float32 [P, 16].

    `scale_L2` (float32) are each layer's units of keys and values in e4m3.
    """

    k_LNHSE: torch.Tensor
    v_LNHSE: torch.Tensor
    scale_L2: torch.Tensor | None
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_2 = None if self.scale_L2 is None else self.scale_L2[index]
        return self.k_LNHSE[index], self.v_LNHSE[index], scale_2

    def places(self, positions: StepPositions) -> tuple[torch.Tensor, ...]:
        """Return the rotations and the tokens' places, as a layer's first kernel reads them."""
        where = positions.row_B, positions.position_B, positions.table_RM
        return self.cos_PR, self.sin_PR, *where


class Form(NamedTuple):
    """Compile-time variants of the kernels.

    Thread blocks of a cluster read the inputs of `layer_in` once (`x_cluster`). `spread` thread
    blocks have a part each of the inputs of `layer_out`, for as many blocks of its rows, and those
    of a cluster (`out_cluster`) read the same part once. Inputs of `layer_in` come in `rounds`.
    """

    tiles: int
    x_cluster: int
    spread: int
    out_cluster: int
    rounds: int = 1


def decode_form(sizes: DecoderSizes, batch: int) -> Form:
    shared, tiles = skinny_gemm.cluster(batch), skinny_gemm.tiles_for(batch)
    spread = sizes.parts if batch >= skinny_gemm.SHARED_FROM else 1
    out_cluster = shared if spread > 1 and sizes.dim % (16 * spread * shared) == 0 else 1
    rounds = skinny_gemm.held_rounds(sizes.dim, tiles, sizes.weight_kind)
    return Form(tiles, shared if rounds == 1 else 1, spread, out_cluster, rounds)


def layer_defines(sizes: DecoderSizes, tiles: int) -> dict[str, int]:
    return {
        "DIM": sizes.dim,
        "FF": sizes.ff_dim,
        "HEADS": sizes.num_heads,
        "ROTARY": sizes.rotary_dim,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "PARTS": sizes.parts,
        "KV_BYTES": sizes.kv_bytes,
        "WEIGHTS": int(sizes.weight_kind),
        "TILES": tiles,
    }


# ---------------------------------------------------------------- head

# Shape legend: B tokens, D width, V outputs.

HEAD_STAGES = {1: 9, 2: 7, 3: 5, 4: 4}
"""Depths of the ring in shared memory, by tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadWeights:
    """The packed map, with the preceding norm folded in; `scales` where rows have them."""

    weights: torch.Tensor
    folded: torch.Tensor
    scales: torch.Tensor | None = None


class LogitsHead:
    """Map of the normed residual stream to float32 logits, for up to 32 tokens."""

    def __init__(
        self,
        weights: HeadWeights,
        dim: int,
        num_outputs: int,
        stages: Mapping[int, int] = HEAD_STAGES,
        kind: WeightKind = WeightKind.BF16,
    ) -> None:
        self._weights, self._dim, self._kind = weights, dim, kind
        self._stages = stages = skinny_gemm.fitting(
            stages,
            lambda tiles, depth: skinny_gemm.whole_shared(dim, 8 * tiles, depth, kind),
            dim,
            kind,
        )
        self.max_tokens = skinny_gemm.most_tokens(stages)
        self._grid = skinny_gemm.even_grid(num_outputs // 16)
        self._kernels = {
            tiles: Module("head.cu", head_defines(dim, num_outputs, tiles, kind)).kernel(
                "head", shared=skinny_gemm.whole_shared(dim, 8 * tiles, stages[tiles], kind)
            )
            for tiles in stages
        }

    def run(self, x_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        batch, weights = x_BD.shape[0], self._weights
        tiles = skinny_gemm.tiles_for(batch)
        stages = self._stages[tiles]
        rounds = skinny_gemm.held_rounds(self._dim, tiles, self._kind)
        self._kernels[tiles].launch(
            (self._grid, 1, 1),
            skinny_gemm.finishing_threads(rounds),
            (x_BD, weights.weights, weights.scales, weights.folded, logits_BV, batch, stages),
            shared=skinny_gemm.whole_shared(self._dim, batch, stages, self._kind),
            overlap=True,
        )


def head_defines(
    dim: int, num_outputs: int, tiles: int, kind: WeightKind = WeightKind.BF16
) -> dict[str, int]:
    return {
        "DIM": dim,
        "VOCAB": num_outputs,
        "WEIGHTS": int(kind),
        "TILES": tiles,
        "ROUNDS": skinny_gemm.held_rounds(dim, tiles, kind),
    }


# ---------------------------------------------------------------- layer boundary

# A few tokens' layers as two kernels each: one across the layer boundary, and attention.
#
# Thread blocks of the first wait for each other, so all must run at once, one on a
# multiprocessor.
#
# Shape legend as in `decoder`, but F inner width and D, L layers.

MOST_TOKENS = 8
"""More take a kernel for each end of a layer."""
STAGES = 8
"""Depth of the ring of weights in bf16; of fewer bits it is as many times deeper."""

_THREADS = skinny_gemm.WORKERS + 64
"""The workers, a warp that reads weights and one that finishes blocks."""
_STATIC = 256  # bytes of shared memory beside the dynamic ones
_FEWEST_LAYERS = 3  # so that a layer's counters are zero again before they are read


class LayerBoundary:
    """The kernel, and its thread blocks' progress counters."""

    def __init__(
        self, sizes: DecoderSizes, layers: Sequence[LayerWeights], cache: StepCache
    ) -> None:
        self._layers, self._cache = layers, cache
        blocks = (3 * sizes.dim + sizes.ff_dim) // 16
        self._stages = _boundary_stages(sizes)
        self._grid = max(skinny_gemm.even_grid(blocks, skinny_gemm.clusters()), sizes.dim // 16)
        self._kernel = _kernel(sizes) if len(layers) >= _FEWEST_LAYERS else None
        shape = len(layers), 2, 32
        self._progress = torch.zeros(shape, dtype=torch.int32, device=cache.cos_PR.device)

    def takes(self, batch: int) -> bool:
        there = self._kernel is not None and self._grid <= skinny_gemm.num_processors()
        return there and batch <= MOST_TOKENS

    def run(
        self,
        x_BD: torch.Tensor,
        positions: StepPositions,
        attend: Callable[[StepPositions, int], None],
        q_BD: torch.Tensor,
        mixed_BF: torch.Tensor,
    ) -> None:
        """Run the layers; `attend` fills the heads of `mixed_BF` by `q_BD`, in a layer's cache."""
        assert self._kernel is not None, "a batch that it does not take"
        last = len(self._layers)
        for index in range(last + 1):
            out: tuple[torch.Tensor | None, ...] = (None,) * 4
            into: tuple[torch.Tensor | None, ...] = (None,) * 3
            cache: tuple[torch.Tensor | None, ...] = (None,) * 3
            if index > 0:
                before = self._layers[index - 1]
                out = before.weights_out, before.scales_out, before.proj_bias, before.fc2_bias
            if index < last:
                layer = self._layers[index]
                into = layer.weights_in, layer.scales_in, layer.folded_in
                cache = self._cache.layer(index)
            self._kernel.launch(
                (self._grid, 1, 1),
                _THREADS,
                (
                    *(mixed_BF, *out, x_BD, *into, *self._cache.places(positions)),
                    *(q_BD, *cache, self._progress, index, last, x_BD.shape[0], self._stages),
                ),
                overlap=True,
            )
            if index < last:
                attend(positions, index)


def fits(sizes: DecoderSizes) -> bool:
    """Return whether a thread block fits the GPU's shared memory."""
    return (
        sizes.parts > 1
        and sizes.dim <= sizes.mixed_dim // sizes.parts
        and shared_bytes(sizes) + _STATIC <= capability.current_gpu().shared
    )


def shared_bytes(sizes: DecoderSizes) -> int:
    """One ring serves both maps."""
    warps = skinny_gemm.WARPS * skinny_gemm.SUM
    sums = max(sizes.parts * warps, 2 * warps + skinny_gemm.SUM)
    stages, kind = _boundary_stages(sizes), sizes.weight_kind
    ring = max(skinny_gemm.weight_ring(each, stages, kind) for each in _boundary_inputs(sizes))
    return ring + skinny_gemm.SUM_BARRIERS + sums


def _boundary_inputs(sizes: DecoderSizes) -> tuple[int, int]:
    """Return how many inputs of either map follow each other."""
    return sizes.dim, sizes.mixed_dim // sizes.parts


def _boundary_stages(sizes: DecoderSizes) -> int:
    kind = sizes.weight_kind
    return min(skinny_gemm.depth(STAGES, each, kind) for each in _boundary_inputs(sizes))


def _kernel(sizes: DecoderSizes) -> Kernel | None:
    """Return the kernel, or None if blocks share a multiprocessor or do not fit one."""
    if not fits(sizes):
        return None
    module = Module("layer_boundary.cu", layer_defines(sizes, tiles=1))
    kernel = module.kernel("layer_boundary", shared=shared_bytes(sizes))
    return kernel if kernel.per_processor(_THREADS) == 1 else None


# ---------------------------------------------------------------- decoder

# A decode step of a decoder with parallel attention and MLP: two or three kernels a layer.
#
# A token's bits are the same in every batch, because sums run in an order that depends on the sizes
# only.
#
# Shape legend: B tokens, D width, F inner width, H heads, E head dim (64), V vocabulary, R rows of
# the page table, M pages per row, N pages, S positions per page, P positions.

_ROTARY_DIM = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Depths of the rings in shared memory, by tiles of 8 tokens; `attend` counts per warp.

    At Moondream 2's sizes each kernel takes more than half of a multiprocessor's shared memory, to
    spread thread blocks over all; but for `layer_in` of one or two tokens, where deeper is slower.
    """

    layer_in: Mapping[int, int]
    layer_out: Mapping[int, int]
    head: Mapping[int, int]
    attend: int
    attend_split: int  # for a cluster that shares a head and has little to read


DEFAULT_STAGES = Stages(
    layer_in={1: 6, 2: 5, 3: 4, 4: 4},
    layer_out={1: 7, 2: 8, 3: 8, 4: 8},
    head=HEAD_STAGES,
    attend=2,
    attend_split=2,
)


class Part(enum.Enum):
    """The kernels of a layer."""

    LAYER_IN = enum.auto()
    EXPERTS = enum.auto()
    GAINS = enum.auto()
    ATTEND = enum.auto()
    LAYER_OUT = enum.auto()


def supported(sizes: DecoderSizes, device: torch.device, dtype: torch.dtype) -> bool:
    return (
        dtype is torch.bfloat16
        and runs(Kernels.STEPS, device)
        and sizes.dim == sizes.num_heads * HEAD_DIM
        and sizes.rotary_dim == _ROTARY_DIM
        and sizes.dim % GROUP == 0
        and sizes.ff_dim % GROUP == 0
        and sizes.vocab_size % 16 == 0
        and sizes.page_size % TILE == 0
        and sizes.page_size * sizes.max_pages <= MAX_CONTEXT
    )


class _Kernels:
    def __init__(self, sizes: DecoderSizes, form: Form, stages: Stages) -> None:
        self.form, tiles = form, form.tiles
        module = Module("layer_maps.cu", decode_defines(sizes, form))
        self.in_stages = stages.layer_in[tiles]
        self.out_stages = stages.layer_out[tiles]
        most = 8 * tiles
        shared = skinny_gemm.whole_shared(sizes.dim, most, self.in_stages, sizes.weight_kind)
        self.layer_in: Kernel = module.kernel("layer_in", shared=shared)
        shared = out_shared(sizes, form, most, self.out_stages)
        self.layer_out: Kernel = module.kernel("layer_out", shared=shared)


class StepDecoder:
    """Dense layers' second half, attention, head and scratch memory of a decode step.

    Steps share the memory and must not overlap. `max_tokens` of a step fit the GPU's shared memory.
    """

    parts: tuple[Part, ...]
    expert_LBK: torch.Tensor | None = None

    def __init__(
        self,
        sizes: DecoderSizes,
        head: HeadWeights,
        cache: StepCache,
        stages: Stages,
        adapters: LowRankMaps | None,
    ) -> None:
        device = cache.cos_PR.device
        self._sizes, self._cache, self._adapters = sizes, cache, adapters
        stages_in_bf16, stages = stages, fitting_stages(sizes, stages)
        self.max_tokens = skinny_gemm.most_tokens(stages.layer_in, stages.layer_out, stages.head)
        forms = decode_forms(sizes, self.max_tokens)
        self._maps = {form: _Kernels(sizes, form, stages) for form in forms}
        self._attention = PagedAttention(sizes.attention, stages.attend, stages.attend_split)
        self._head = LogitsHead(
            head, sizes.dim, sizes.vocab_size, stages_in_bf16.head, sizes.head_kind
        )
        # Results between a layer's kernels.
        self._q_BD = torch.zeros(MAX_TOKENS, sizes.dim, dtype=torch.bfloat16, device=device)
        self._mixed_BF = torch.zeros(
            MAX_TOKENS, sizes.mixed_dim, dtype=torch.bfloat16, device=device
        )
        self._heads_BD = self._mixed_BF[:, sizes.ff_dim :]
        # What thread blocks of a spread `layer_out` leave for the last of them.
        blocks = sizes.dim // 16
        largest = max(form.spread * form.tiles for form in forms) * skinny_gemm.SUM // 4
        self._sums = torch.zeros(blocks, largest, device=device)
        self._counts = torch.zeros(blocks, dtype=torch.int32, device=device)

    def head(self, x_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        self._head.run(x_BD, logits_BV)

    def _inner_change(
        self, layer: int, x_BD: torch.Tensor, slot_R: torch.Tensor | None, row_B: torch.Tensor
    ) -> torch.Tensor | None:
        if slot_R is None:
            return None
        assert self._adapters is not None, "adapters need a bank"
        return self._adapters.inner(layer, x_BD, slot_R, row_B)

    def _outer_change(
        self, layer: int, slot_R: torch.Tensor | None, row_B: torch.Tensor
    ) -> torch.Tensor | None:
        if slot_R is None:
            return None
        assert self._adapters is not None, "adapters need a bank"
        return self._adapters.outer(layer, self._mixed_BF, slot_R, row_B)

    def _attend(self, positions: StepPositions, layer: int) -> None:
        keys, values, scale_2 = self._cache.layer(layer)
        self._attention.launch(self._q_BD, keys, values, positions, self._heads_BD, scale_2)

    def _layer_out(
        self, x_BD: torch.Tensor, weights: LayerWeights, change_BD: torch.Tensor | None
    ) -> None:
        batch, sizes = x_BD.shape[0], self._sizes
        kernels = self._maps[decode_form(sizes, batch)]
        stages = kernels.out_stages
        kernels.layer_out.launch(
            (sizes.dim // 16, 1, 1),
            skinny_gemm.THREADS,
            (
                *(self._mixed_BF, weights.weights_out, weights.scales_out),
                *(weights.proj_bias, weights.fc2_bias),
                *(x_BD, change_BD, self._sums, self._counts, batch, stages),
            ),
            cluster=kernels.form.out_cluster,
            shared=out_shared(sizes, kernels.form, batch, stages),
            overlap=True,
        )


class CudaDecoder(StepDecoder):
    """A decoder without gains; `LayerBoundary` runs the layers of the batches that it takes."""

    parts = (Part.LAYER_IN, Part.ATTEND, Part.LAYER_OUT)

    def __init__(
        self,
        sizes: DecoderSizes,
        layers: Sequence[LayerWeights],
        head: HeadWeights,
        cache: StepCache,
        stages: Stages = DEFAULT_STAGES,
        adapters: LowRankMaps | None = None,
    ) -> None:
        super().__init__(sizes, head, cache, stages, adapters)
        self._layers = layers
        self._boundary = LayerBoundary(sizes, layers, cache)
        self._grid_in = skinny_gemm.even_grid(
            (3 * sizes.dim + sizes.ff_dim) // 16, skinny_gemm.clusters()
        )

    def layers(
        self,
        x_BD: torch.Tensor,
        positions: StepPositions,
        parts: Collection[Part] = tuple(Part),
        slot_R: torch.Tensor | None = None,
    ) -> None:
        """Run all layers on at most `MAX_TOKENS` tokens in place; writes keys and values to pages.

        `slot_R`: the adapter slot of each row; None: there are no adapters. Fewer `parts` are for
        measuring: their results mean nothing.
        """
        whole = slot_R is None and set(self.parts) <= set(parts)
        if whole and self._boundary.takes(x_BD.shape[0]):
            self._boundary.run(x_BD, positions, self._attend, self._q_BD, self._mixed_BF)
            return
        for layer, weights in enumerate(self._layers):
            inner_BF = self._inner_change(layer, x_BD, slot_R, positions.row_B)
            if Part.LAYER_IN in parts:
                self._layer_in(x_BD, layer, weights, positions, inner_BF)
            if Part.ATTEND in parts:
                self._attend(positions, layer)
            outer_BD = self._outer_change(layer, slot_R, positions.row_B)
            if Part.LAYER_OUT in parts:
                self._layer_out(x_BD, weights, outer_BD)

    def _layer_in(
        self,
        x_BD: torch.Tensor,
        layer: int,
        weights: LayerWeights,
        positions: StepPositions,
        change_BF: torch.Tensor | None,
    ) -> None:
        batch = x_BD.shape[0]
        kernels = self._maps[decode_form(self._sizes, batch)]
        kernels.layer_in.launch(
            (self._grid_in, 1, 1),
            skinny_gemm.finishing_threads(kernels.form.rounds),
            (
                *(x_BD, weights.weights_in, weights.scales_in, weights.folded_in),
                *(*self._cache.places(positions), self._q_BD, self._mixed_BF),
                *(*self._cache.layer(layer), change_BF, batch, kernels.in_stages),
            ),
            cluster=kernels.form.x_cluster,
            shared=skinny_gemm.whole_shared(
                self._sizes.dim, batch, kernels.in_stages, self._sizes.weight_kind
            ),
            overlap=True,
        )


def out_shared(sizes: DecoderSizes, form: Form, batch: int, stages: int) -> int:
    parts, elsewhere = sizes.parts, form.spread > 1
    return skinny_gemm.parts_shared(
        sizes.mixed_dim, parts, batch, stages, sizes.weight_kind, beside=not elsewhere
    )


def fitting_stages(sizes: DecoderSizes, stages: Stages, rounds: int | None = None) -> Stages:
    """Cut the rings of the maps to the GPU's shared memory.

    `rounds` are those of a first map that always has as many.
    """
    kind, head_kind = sizes.weight_kind, sizes.head_kind

    def into(tiles: int, depth: int) -> int:
        return skinny_gemm.whole_shared(sizes.dim, 8 * tiles, depth, kind, rounds)

    def head(tiles: int, depth: int) -> int:
        return skinny_gemm.whole_shared(sizes.dim, 8 * tiles, depth, head_kind)

    def out(tiles: int, depth: int) -> int:
        return out_shared(sizes, decode_form(sizes, 8 * tiles), 8 * tiles, depth)

    return dataclasses.replace(
        stages,
        layer_in=skinny_gemm.fitting(stages.layer_in, into, sizes.dim, kind),
        layer_out=skinny_gemm.fitting(stages.layer_out, out, sizes.mixed_dim // sizes.parts, kind),
        head=skinny_gemm.fitting(stages.head, head, sizes.dim, head_kind),
    )


def decode_forms(sizes: DecoderSizes, max_tokens: int = MAX_TOKENS) -> list[Form]:
    return sorted({decode_form(sizes, batch) for batch in range(1, max_tokens + 1)})


def decode_defines(sizes: DecoderSizes, form: Form) -> dict[str, int]:
    return {
        **layer_defines(sizes, form.tiles),
        "SPREAD": form.spread,
        "X_CLUSTER": form.x_cluster,
        "OUT_CLUSTER": form.out_cluster,
        "INPUT_STAGES": skinny_gemm.INPUT_STAGES[form.tiles],
        "ROUNDS": form.rounds,
    }
