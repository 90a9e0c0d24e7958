"""A decode step of a decoder with parallel attention and MLP, as three kernels a layer.

The kernels read weights packed for them (`packing`). A token's results have the same bits whatever
batch it is in: sums run in an order that depends on the sizes alone.

Shape legend: B tokens, D width, F inner width, H heads, E head dim (64), V vocabulary, R rows of
the page table, M pages per row, N pages, S positions per page, P positions.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence

import torch

from legato_engine.kernels.cuda import streams
from legato_engine.kernels.cuda.adapters import StepAdapters
from legato_engine.kernels.cuda.head import HEAD_STAGES, Head, HeadWeights
from legato_engine.kernels.cuda.module import Kernel, Module

MAX_TOKENS = 32
"""Tokens that one pass of the weights serves."""
SPLITS = (1, 2, 4)
"""Thread blocks per head of a token that `attend` is compiled for."""

_HEAD_DIM = 64
_ROTARY_DIM = 32
_MAX_CONTEXT = 4096  # attend.cu
_ATTEND_STAGE = 2 * 16 * _HEAD_DIM * 2 + 16  # keys and values of 16 positions, and a barrier
_MIN_CAPABILITY = (9, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What the kernels are compiled for."""

    dim: int
    ff_dim: int
    num_heads: int
    rotary_dim: int
    vocab_size: int
    page_size: int
    max_pages: int

    @property
    def mixed_dim(self) -> int:
        """The inputs of a layer's output map: the heads, then the inner activations."""
        return self.dim + self.ff_dim

    @property
    def parts(self) -> int:
        """Parts that the inputs of a layer's output map are cut into."""
        return streams.num_parts(self.mixed_dim, self.dim)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; bf16 but `folded_in`. The maps are packed, the norm is folded into the first."""

    weights_in: torch.Tensor
    folded_in: torch.Tensor
    weights_out: torch.Tensor
    proj_bias: torch.Tensor
    fc2_bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where B tokens stand, int64: their rows of `table_RM`, their positions, and `fresh_B`: the
    first position of each token's sequence that this very step writes.
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    table_RM: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """How deep the rings in shared memory are, by tiles of 8 tokens.

    At Moondream 2's sizes each kernel takes more than half of a processor's shared memory, so that
    none runs twice on one processor while another has nothing to do; narrower models have fewer
    thread blocks than there are processors. `attend` counts per warp.
    """

    layer_in: Mapping[int, int]
    layer_out: Mapping[int, int]
    head: Mapping[int, int]
    attend: int
    attend_split: int  # where a cluster shares a head, and has little to read


DEFAULT_STAGES = Stages(
    layer_in={1: 7, 2: 7, 4: 4},
    layer_out={1: 7, 2: 9, 4: 8},
    head=HEAD_STAGES,
    attend=4,
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
    """Whether these kernels can run this decoder there; otherwise torch's own operations must."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    return (
        sizes.dim == sizes.num_heads * _HEAD_DIM
        and sizes.rotary_dim == _ROTARY_DIM
        and sizes.dim % streams.GROUP == 0
        and sizes.ff_dim % streams.GROUP == 0
        and sizes.vocab_size % 16 == 0
        and sizes.page_size % 16 == 0
        and sizes.page_size * sizes.max_pages <= _MAX_CONTEXT
    )


class _Kernels:
    """The kernels for one number of tiles."""

    def __init__(self, sizes: DecoderSizes, tiles: int, stages: Stages) -> None:
        self.split = streams.is_split(sizes.parts, tiles)
        module = Module("decode.cu", decode_defines(sizes, tiles))
        self.in_stages = stages.layer_in[tiles]
        self.out_stages = stages.layer_out[tiles]
        most = 8 * tiles
        shared = streams.whole_shared(sizes.dim, most, self.in_stages)
        self.layer_in: Kernel = module.kernel("layer_in", shared=shared)
        shared = streams.parts_shared(sizes.mixed_dim, sizes.parts, most, self.out_stages)
        self.layer_out: Kernel = module.kernel("layer_out", shared=shared)


class Decoder:
    """The kernels, and the scratch memory between them; steps share it and must not overlap."""

    parts = (Part.LAYER_IN, Part.ATTEND, Part.LAYER_OUT)

    def __init__(
        self, sizes: DecoderSizes, device: torch.device, stages: Stages = DEFAULT_STAGES
    ) -> None:
        self._sizes = sizes
        self._stages = stages
        self._kernels = {tiles: _Kernels(sizes, tiles, stages) for tiles in streams.TILES}
        self._attends = {splits: self._attend_kernel(splits) for splits in SPLITS}
        self._grid_in = streams.even_grid((3 * sizes.dim + sizes.ff_dim) // 16)
        self._head = Head(sizes.dim, sizes.vocab_size, stages.head)
        # What the kernels of a layer leave each other; those in front of `attend` may be others.
        self.q_BD = torch.zeros(MAX_TOKENS, sizes.dim, dtype=torch.bfloat16, device=device)
        self.mixed_BF = torch.zeros(
            MAX_TOKENS, sizes.mixed_dim, dtype=torch.bfloat16, device=device
        )

    def layers(
        self,
        x_BD: torch.Tensor,
        layers: Sequence[LayerWeights],
        places: Places,
        k_LNHSE: torch.Tensor,
        v_LNHSE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        parts: Collection[Part] = tuple(Part),
        adapters: StepAdapters | None = None,
    ) -> None:
        """Run all layers on `x_BD` in place; writes the tokens' keys and values into their pages.

        `angles`: cosines and sines [P, 16] float32. At most `MAX_TOKENS` tokens. Fewer `parts` are
        for measuring: what they compute means nothing.
        """
        for layer, weights in enumerate(layers):
            keys, values = k_LNHSE[layer], v_LNHSE[layer]
            inner_BF = outer_BD = None
            if adapters is not None:
                inner_BF = adapters.inner(layer, x_BD, places.row_B)
            if Part.LAYER_IN in parts:
                self._layer_in(x_BD, weights, places, keys, values, angles, inner_BF)
            if Part.ATTEND in parts:
                self.attend(x_BD.shape[0], places, keys, values)
            if adapters is not None:
                outer_BD = adapters.outer(layer, self.mixed_BF, places.row_B)
            if Part.LAYER_OUT in parts:
                self.layer_out(x_BD, weights, outer_BD)

    def head(self, x_BD: torch.Tensor, weights: HeadWeights, logits_BV: torch.Tensor) -> None:
        """Write float32 logits of the residual stream."""
        self._head.run(x_BD, weights, logits_BV)

    def _layer_in(
        self,
        x_BD: torch.Tensor,
        weights: LayerWeights,
        places: Places,
        keys: torch.Tensor,
        values: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        change_BF: torch.Tensor | None,
    ) -> None:
        batch = x_BD.shape[0]
        kernels = self._kernels[streams.tiles_for(batch)]
        kernels.layer_in.launch(
            (self._grid_in, 1, 1),
            streams.THREADS,
            (
                *(x_BD, weights.weights_in, weights.folded_in),
                *(*angles, places.row_B, places.position_B, places.table_RM),
                *(self.q_BD, self.mixed_BF, keys, values, change_BF, batch, kernels.in_stages),
            ),
            shared=streams.whole_shared(self._sizes.dim, batch, kernels.in_stages),
            overlap=True,
        )

    def attend(self, batch: int, places: Places, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The heads' output into `mixed_BF`, of `q_BD` and one layer's keys and values."""
        pairs = batch * self._sizes.num_heads
        splits = next((s for s in SPLITS[:0:-1] if pairs * s <= streams.num_processors()), 1)
        stages = self._attend_stages(splits)
        self._attends[splits].launch(
            (streams.even_grid(pairs) * splits, 1, 1),
            streams.WORKERS,
            (
                *(self.q_BD, keys, values, places.row_B, places.position_B, places.fresh_B),
                *(places.table_RM, self.mixed_BF, batch, stages),
            ),
            cluster=splits,
            overlap=True,
        )

    def layer_out(
        self, x_BD: torch.Tensor, weights: LayerWeights, change_BD: torch.Tensor | None = None
    ) -> None:
        """Add the map of `mixed_BF`: heads and inner activations; and what adapters change."""
        batch, sizes = x_BD.shape[0], self._sizes
        kernels = self._kernels[streams.tiles_for(batch)]
        stages = kernels.out_stages
        kernels.layer_out.launch(
            (sizes.dim // 16, 1, 1),
            streams.THREADS,
            (
                *(self.mixed_BF, weights.weights_out, weights.proj_bias, weights.fc2_bias),
                *(x_BD, change_BD, batch, stages),
            ),
            shared=streams.parts_shared(sizes.mixed_dim, sizes.parts, batch, stages),
            cluster=sizes.parts if kernels.split else 1,
            overlap=True,
        )

    def _attend_kernel(self, splits: int) -> Kernel:
        module = Module("attend.cu", attend_defines(self._sizes, splits))
        return module.kernel("attend", shared=attend_shared(self._attend_stages(splits)))

    def _attend_stages(self, splits: int) -> int:
        return self._stages.attend if splits == 1 else self._stages.attend_split


def attend_shared(stages: int) -> int:
    """Bytes of dynamic shared memory of `attend` with rings of `stages`."""
    return streams.WARPS * stages * _ATTEND_STAGE


def decode_defines(sizes: DecoderSizes, tiles: int) -> dict[str, int]:
    """Constants of `decode.cu`."""
    return {
        "DIM": sizes.dim,
        "FF": sizes.ff_dim,
        "HEADS": sizes.num_heads,
        "ROTARY": sizes.rotary_dim,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "PARTS": sizes.parts,
        "SPLIT": int(streams.is_split(sizes.parts, tiles)),
        "INPUT_STAGES": streams.INPUT_STAGES[tiles],
        "TILES": tiles,
    }


def attend_defines(sizes: DecoderSizes, splits: int) -> dict[str, int]:
    """Constants of `attend.cu` where `splits` thread blocks share a head of a token."""
    return {
        "DIM": sizes.dim,
        "MIXED": sizes.mixed_dim,
        "HEADS": sizes.num_heads,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "SPLITS": splits,
    }
