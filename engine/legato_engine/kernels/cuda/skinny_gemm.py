"""Sizes and weight packing of the skinny GEMM kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from legato_engine.kernels.cuda import capability
from legato_engine.kernels.cuda.capability import Feature
from legato_engine.kernels.cuda.module import Kernel, Module, made_on
from legato_engine.kernels.map_codes import GROUP, MapCodes, WeightKind, format_of, map_codes

WARPS = 8
WORKERS = 32 * WARPS
THREADS = WORKERS + 64
"""The workers, and a warp each that reads weights and inputs."""
FINISHERS = {1: 4, 2: 3}
"""Warps that finish what the workers multiplied, in kernels that hold all inputs, by rounds."""
TILES = (1, 2, 3, 4)
"""Groups of 8 tokens that kernels are compiled for."""

INPUT_STAGES = {1: 4, 2: 4, 3: 3, 4: 2}
"""Stages of the ring of inputs, by tiles."""

PAD = 32
"""Padding elements after each token's inputs."""

CLUSTER = 2
"""Thread blocks of a cluster; clusters of four would not all fit an H200 at once."""

SUM = 512
"""Bytes of a block's sums over one tile."""
SUM_BARRIERS = 128
"""Bytes of the barriers between the workers and the finishers."""
INPUT_BARRIERS = 128
"""Bytes of those that chunks of inputs arrive at, in kernels that hold all inputs."""

_MOMENT = 8
_STATIC = 384  # bytes of shared memory, at most, that kernels have beside the dynamic ones
_FEWEST_STAGES = 2
_ENOUGH_STAGES = 3
SHARED_FROM = 3
"""Tokens from which sharing inputs pays off."""
_PARTS = 4
_LONG = 4096  # inputs from which cutting pays off


def tiles_for(batch: int) -> int:
    return next(tiles for tiles in TILES if batch <= 8 * tiles)


def tiles_up_to(tokens: int) -> tuple[int, ...]:
    return tuple(tiles for tiles in TILES if 8 * tiles <= tokens)


def chunk(inputs: int) -> int:
    """Return the inputs of a stage: a group a warp, or the largest number that divides `inputs`."""
    return next(g * GROUP for g in range(WARPS, 0, -1) if inputs % (g * GROUP) == 0)


def num_parts(inputs: int, outputs: int) -> int:
    divides = inputs % (_PARTS * GROUP) == 0 and outputs % (_PARTS * 16) == 0
    return _PARTS if divides and inputs >= _LONG else 1


def cluster(batch: int) -> int:
    """Thread blocks that share inputs; 1 on GPUs without clusters."""
    return clusters() if batch >= SHARED_FROM else 1


def clusters() -> int:
    return CLUSTER if capability.current_gpu().has(Feature.CLUSTERS) else 1


def fitting(
    stages: Mapping[int, int],
    size: Callable[[int, int], int],
    inputs: int = 0,
    kind: WeightKind = WeightKind.BF16,
) -> dict[int, int]:
    """Cut the depths of rings to the GPU's shared memory.

    `stages` are the depths in bf16 by tiles, of fewer bits with about as many bytes; `inputs` of a
    row follow each other; `size(tiles, depth)` are the bytes that a kernel takes. Tiles that do not
    fit are left out.
    """
    most = capability.current_gpu().shared - _STATIC
    fit = {}
    for tiles, depth_in_bf16 in stages.items():
        wanted = depth(depth_in_bf16, inputs, kind)
        depths = range(wanted, min(wanted, _FEWEST_STAGES) - 1, -1)
        found = next((each for each in depths if size(tiles, each) <= most), 0)
        if found:
            fit[tiles] = found
    return fit


def depth(depth_in_bf16: int, inputs: int, kind: WeightKind) -> int:
    """Return the stages with about as many bytes as those of bf16."""
    if kind is WeightKind.BF16:
        return depth_in_bf16
    return depth_in_bf16 * 16 // (kind.bits * kind.span(inputs // chunk(inputs)))


def most_tokens(*fitted: Mapping[int, int]) -> int:
    """Tokens of a launch that all kernels of these depths fit."""
    return 8 * min(max(each) for each in fitted)


def whole_shared(
    inputs: int,
    batch: int,
    stages: int,
    kind: WeightKind = WeightKind.BF16,
    rounds: int | None = None,
) -> int:
    """Return the bytes of shared memory for all tokens' inputs and their moments."""
    width = chunk(inputs)
    parts = held_rounds(inputs, tiles_for(batch), kind) if rounds is None else rounds
    held_inputs = -(-(inputs // width) // parts) * width
    held = INPUT_BARRIERS + columns(batch) * (held_inputs + PAD) * 2
    beside = SUM_BARRIERS + block_sums(batch) + 8 * tiles_for(batch) * _MOMENT
    return weight_ring(inputs, stages, kind) + held + beside


def held_rounds(inputs: int, tiles: int, kind: WeightKind = WeightKind.BF16) -> int:
    """Return in how many rounds inputs come: 2 where all of them would leave few stages."""
    most = capability.current_gpu().shared - _STATIC
    fits = whole_shared(inputs, 8 * tiles, _ENOUGH_STAGES, kind, rounds=1) <= most
    return 1 if fits or inputs == chunk(inputs) else 2


def finishing_threads(rounds: int) -> int:
    """Threads of such a kernel, with a warp that reads weights."""
    return WORKERS + 32 * (1 + FINISHERS[rounds])


def parts_shared(
    inputs: int,
    parts: int,
    batch: int,
    stages: int,
    kind: WeightKind = WeightKind.BF16,
    *,
    beside: bool = True,
) -> int:
    """Return the bytes of shared memory for inputs that stream through a ring.

    The warps' sums reuse the memory of both rings; the thread block's are `beside` it, or
    elsewhere.
    """
    tiles = tiles_for(batch)
    width = chunk(inputs // parts)
    rings = weight_ring(inputs // parts, stages, kind)
    rings += ring(columns(batch) * (width + PAD), INPUT_STAGES[tiles])
    assert rings - _barriers(stages) >= WARPS * parts * tiles * SUM, f"{stages} stages hold no sums"
    return rings + (parts * tiles * SUM if beside else 0)


def block_sums(batch: int, blocks: int = 2) -> int:
    """Return the bytes of the partial sums of blocks in progress."""
    return blocks * WARPS * tiles_for(batch) * SUM


def columns(batch: int) -> int:
    tiles = tiles_for(batch)
    return batch if tiles == 1 else 8 * tiles


def weight_ring(inputs: int, stages: int, kind: WeightKind) -> int:
    """Bytes of a ring of stages of 16 rows, of which `inputs` follow each other."""
    width = chunk(inputs)
    return _barriers(stages) + stages * kind.span(inputs // width) * kind.stage_bytes(width)


def ring(elements: int, stages: int) -> int:
    return _barriers(stages) + stages * elements * 2


def num_processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def even_grid(blocks: int, multiple: int = 1) -> int:
    """One wave, with as even shares as possible."""
    each = -(-blocks // num_processors())
    return -(-blocks // each // multiple) * multiple


def _barriers(stages: int) -> int:
    return -(-stages // 8) * 128


# ---------------------------------------------------------------- packing

# Weight layouts of the kernels of `skinny_gemm.cuh`, in bf16 or quantised.
#
# Shape legend: O outputs, I inputs, G groups of 64 inputs.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedMap:
    """A packed map; `scale_O` are float32 scales of its rows.

    Packed row r is row `order_O[r]` (int32) of the map, or r without it.
    """

    kind: WeightKind
    data: torch.Tensor
    scale_O: torch.Tensor | None
    outputs: int
    inputs: int
    chunk: int
    order_O: torch.Tensor | None = None

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return rows and columns of the map in bf16: multiples of 16 and of 64.

        Rows that `order_O` moves stay among them.
        """
        if self.data.device.type == "cuda":
            return _unpacked(self, rows, columns)
        return self.dequantised()[rows, columns].bfloat16().contiguous()

    def dequantised(self) -> torch.Tensor:
        """Undo the packing in torch, float32 [O, I]."""
        stages = self.data.view(torch.uint8).view(self.outputs // 16, self.inputs // self.chunk, -1)
        num_bytes = self.kind.stage_bytes(self.chunk)
        assert stages.shape[2] == num_bytes, "stages are as long as the kernels count them"
        if self.kind is WeightKind.BF16:
            codes = stages.contiguous().view(torch.bfloat16)
            return self._ordered(codes.view(-1)).float()
        codes, beside = stages.tensor_split([2 * self.kind.bits * self.chunk], dim=2)
        if self.kind.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        exact_OI = self._ordered(codes).view(self.kind.code_dtype).float()
        if not beside.numel():
            assert self.scale_O is not None, "8 bits have scales"
            return exact_OI * self.scale_O[:, None]
        if self.kind.bits == 4 and self.kind is not WeightKind.Q4_1:
            exact_OI -= 8.0
        scale_dtype = torch.bfloat16 if self.kind is WeightKind.INT4 else torch.float16
        of = beside.contiguous().view(scale_dtype)
        of = of.view(*stages.shape[:2], self.chunk // GROUP, 8, self.kind.num_scales, 2)
        of_OGS = self._own(of.permute(0, 5, 3, 1, 2, 4).flatten(0, 2).flatten(1, 2).float())
        scales, *minima = torch.split(of_OGS, min(self.kind.num_scales, 2), dim=2)
        exact_OGE = exact_OI.view(self.outputs, scales[0].numel(), -1)
        exact_OGE *= scales.reshape(self.outputs, -1, 1)
        for least in minima:
            exact_OGE += least.reshape(self.outputs, -1, 1)
        return exact_OGE.flatten(1)

    def _ordered(self, codes: torch.Tensor) -> torch.Tensor:
        """Return fragments as [O, I]."""
        shape, order = _fragments(self.outputs, self.inputs, self.chunk), _ORDERS[self.kind.bits]
        back = sorted(range(len(order)), key=order.__getitem__)
        there = codes.reshape([shape[dim] for dim in order])
        return self._own(there.permute(back).reshape(self.outputs, self.inputs))

    def _own(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed rows in the map's order."""
        if self.order_O is None:
            return packed
        return torch.empty_like(packed).index_copy_(0, self.order_O.long(), packed)


_ORDERS = {
    16: (0, 3, 4, 1, 5, 2, 6, 7, 8, 9),
    8: (0, 3, 4, 1, 2, 6, 5, 7, 9, 8),
    4: (0, 3, 4, 2, 6, 1, 5, 9, 7, 8),
}
"""Dimensions of `_fragments` as packed, by the bits of a code.

A lane has 8 inputs of each half of a group of 64, of rows g and g + 8: in bf16 as four runs of all
lanes; of fewer bits as far as they share 16 bytes, with pairs where the kernels' shifts and masks
find them."""


def _fragments(outputs: int, inputs: int, chunk: int) -> tuple[int, ...]:
    """Split a map by block, rows 8 apart, row, stage, warp, half, lane of a row, value and bits."""
    return (outputs // 16, 2, 8, inputs // chunk, chunk // GROUP, 2, 4, 2, 2, 2)


def pack_codes(
    quantised: MapCodes, parts: int = 1, order_O: torch.Tensor | None = None
) -> PackedMap:
    """Pack a map whose inputs the kernel cuts into `parts`.

    Packed row r is its row `order_O[r]`. Scales of more inputs than `GROUP` are repeated.
    """
    kind, codes_OI, scales = quantised.packed_kind, quantised.values(), quantised.scales
    if kind is not WeightKind.BF16:
        codes_OI = codes_OI.view(torch.uint8)
    if order_O is not None:
        codes_OI, order_O = codes_OI[order_O], order_O.int()
    outputs, inputs = codes_OI.shape
    width = chunk(inputs // parts)
    data = codes_OI.reshape(_fragments(outputs, inputs, width)).permute(_ORDERS[kind.bits])
    data = data.contiguous()
    if kind.bits == 4:
        data = data[..., 0] | data[..., 1] << 4
    if kind.num_scales:
        data = data.reshape(outputs // 16, inputs // width, -1)
        parts_OG = [each for each in (scales, quantised.minima) if each is not None]
        num = kind.num_scales // len(parts_OG)
        groups = inputs // GROUP * num
        parts_OG = [each.repeat_interleave(groups // each.shape[1], 1) for each in parts_OG]
        of_OGS = torch.cat([each.view(outputs, -1, num) for each in parts_OG], dim=2)
        if order_O is not None:
            of_OGS = of_OGS[order_O.long()]
        of = of_OGS.view(outputs // 16, 2, 8, inputs // width, width // GROUP, -1)
        bytes_of = of.permute(0, 3, 4, 2, 5, 1).contiguous().view(torch.uint8)
        data = torch.cat([data, bytes_of.reshape(*data.shape[:2], -1)], dim=2)
        scales = None
    return PackedMap(kind, data.flatten(), scales, outputs, inputs, width, order_O)


def packed_map(
    weights_OI: torch.Tensor,
    kind: WeightKind,
    parts: int = 1,
    order_O: torch.Tensor | None = None,
) -> PackedMap:
    """Quantise and pack a map, as `pack_codes`."""
    return pack_codes(map_codes(weights_OI, format_of(kind)), parts, order_O)


def pack(weights_OI: torch.Tensor, parts: int = 1) -> torch.Tensor:
    return packed_map(weights_OI, WeightKind.BF16, parts).data


def _unpacked(packed: PackedMap, rows: slice, columns: slice) -> torch.Tensor:
    first, count = rows.start // 16, (rows.stop - rows.start) // 16
    width = columns.stop - columns.start
    out_OI = torch.empty(16 * count, width, dtype=torch.bfloat16, device=packed.data.device)
    chunk = packed.chunk
    stages = -(-columns.stop // chunk) - columns.start // chunk
    made_on(packed.data.device, _unpacker, packed.kind, chunk).launch(
        (count, stages, 1),
        WORKERS,
        (
            *(packed.data, packed.scale_O, packed.order_O, out_OI),
            *(first, packed.inputs // chunk, columns.start, columns.stop),
        ),
        overlap=True,
    )
    return out_OI


def _unpacker(kind: WeightKind, chunk: int) -> Kernel:
    return Module("unpack.cu", unpack_defines(kind, chunk)).kernel("unpack")


LINEAR_STAGES = {1: 4, 2: 6, 3: 5, 4: 4}
"""Depths of the ring of `packed_linear`, by tiles; of one, two thread blocks fit an H200."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearSizes:
    """Constants of a map's kernels; `gates`: silu of its first half may multiply its second.

    Of more than `most` tokens they are not compiled.
    """

    inputs: int
    outputs: int
    kind: WeightKind
    gates: bool = False
    most: int = 8 * TILES[-1]

    def shared(self, batch: int, depth: int) -> int:
        return parts_shared(self.inputs, 1, batch, depth, self.kind, beside=False)

    def blocks(self, tiles: int, depth: int) -> int:
        """Return the blocks of a thread block: what makes for the fewest turns, in few launches.

        All their sums fit the ring of weights, and the registers.
        """
        count = self.outputs // 16
        slots = num_processors() * (2 if tiles == 1 else 1)
        held = weight_ring(self.inputs, depth, self.kind) - _barriers(depth)
        most = min(WARPS // tiles, max(1, held // (WARPS * tiles * SUM)))
        if self.kind is WeightKind.Q4_1 and tiles > 2:  # whose minima take registers
            most = 1
        each = [blocks for blocks in range(1, most + 1) if count % blocks == 0]
        return min(each, key=lambda blocks: (-(-count // (blocks * slots)) * blocks, -blocks))

    def defines(self, tiles: int, depth: int) -> dict[str, int]:
        return {
            "MAP_INPUTS": self.inputs,
            "WEIGHTS": int(self.kind),
            "TILES": tiles,
            "INPUT_STAGES": INPUT_STAGES[tiles],
            "MAP_BLOCKS": self.blocks(tiles, depth),
            "GATE": int(self.gates),
        }


class LinearKernels:
    """The product of a few tokens with a packed map, which their launch reads once."""

    def __init__(self, sizes: LinearSizes) -> None:
        self._sizes = sizes
        self._stages = stages = linear_stages(sizes)
        self.max_tokens = most_tokens(stages)
        self._kernels = {
            tiles: Module("packed_linear.cu", sizes.defines(tiles, depth)).kernel(
                "packed_linear", shared=sizes.shared(8 * tiles, depth)
            )
            for tiles, depth in stages.items()
        }

    def run(
        self,
        x_BI: torch.Tensor,
        packed: PackedMap,
        bias_O: torch.Tensor | None,
        *,
        gated: bool = False,
        onto_BO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [B, O], half as wide if `gated`; `onto_BO` is added to, in place."""
        (batch, _), outputs = x_BI.shape, packed.outputs
        tiles = tiles_for(batch)
        stages, width = self._stages[tiles], outputs // 2 if gated else outputs
        out_BO = x_BI.new_empty(batch, width) if onto_BO is None else onto_BO
        self._kernels[tiles].launch(
            (outputs // 16 // self._sizes.blocks(tiles, stages), 1, 1),
            THREADS,
            (
                *(x_BI, packed.data, packed.scale_O, bias_O, onto_BO, out_BO),
                *(outputs, int(gated), batch, stages),
            ),
            shared=self._sizes.shared(batch, stages),
            overlap=True,
        )
        return out_BO


def linear_stages(sizes: LinearSizes) -> dict[int, int]:
    return fitting(
        {tiles: LINEAR_STAGES[tiles] for tiles in tiles_up_to(sizes.most)},
        lambda tiles, depth: sizes.shared(8 * tiles, depth),
        sizes.inputs,
        sizes.kind,
    )


def gate_order(outputs: int, device: torch.device) -> torch.Tensor:
    """Return the row order of a map that puts rows of both halves 8 apart within a block."""
    return torch.arange(outputs, device=device).view(2, -1, 8).transpose(0, 1).flatten()


def unpack_defines(kind: WeightKind, chunk: int) -> dict[str, int]:
    return {"WEIGHTS": int(kind), "MAP_CHUNK": chunk}


def pair_rotated(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the row order of a QKV map that puts rotated pairs 8 apart within a block.

    Of a head's 64 rows the first 32 are rotated, row i with row i + 16.
    """
    head = [*range(8), *range(16, 24), *range(8, 16), *range(24, 64)]
    order = torch.tensor(head, device=device)
    starts = torch.arange(3 * num_heads, device=device) * 64
    return (starts[:, None] + order).flatten()


def fold_norm(
    weights_OI: torch.Tensor, bias_O: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a map of normed inputs into weights of raw inputs and [O, 2] float32 corrections.

    With mean m and inverse deviation r of a token, W (g (x - m) r + b) + c equals r (Wg x - m
    sum(Wg)) + (W b + c). The corrections are sum(Wg), of the rounded weights, and W b + c. `norm`
    is (g, b).
    """
    scale_I, shift_I = (value.float() for value in norm)
    scaled_OI = (weights_OI.float() * scale_I).to(weights_OI.dtype)
    biases_O = weights_OI.float() @ shift_I + bias_O.float()
    return scaled_OI, torch.stack([scaled_OI.float().sum(1), biases_O], dim=1).contiguous()
