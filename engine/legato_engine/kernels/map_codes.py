"""Quantised linear maps row by row, as checkpoints store them and before kernels pack them.

Shape legend: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

GROUP = 64
"""Inputs of a row that share a scale of int4 in a GPU's kernels."""

GROUPS = (GROUP, 2 * GROUP)
"""Inputs of a scale of int4 that a checkpoint may have."""

BLOCK = 32
"""Inputs of a scale in GGUF's blocks."""

_E4M3_MOST, _INT8_MOST, _INT4_MOST = 448.0, 127.0, 7.0
_LEAST_SCALE = 1e-12
_INT4_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of the scale that reaches a group's largest weight; the one with the least error."""


class WeightKind(enum.IntEnum):
    """Number format of a map's weights; the values are those of `stage_ring.cuh`.

    In a GPU's kernels e4m3 and int8 have a float32 scale for each row, int4 a bf16 scale for each
    64 inputs of a row. The blocks of GGUF have the codes of int8 or int4 with an fp16 scale for
    each 32 inputs, those of Q4_1 also an fp16 minimum.
    """

    BF16 = 0
    E4M3 = 1
    INT8 = 2
    INT4 = 3
    Q8_0 = 4
    Q4_0 = 5
    Q4_1 = 6

    @property
    def bits(self) -> int:
        return 4 if self.code_dtype is torch.uint8 else 8 * self.code_dtype.itemsize

    @property
    def of_head(self) -> WeightKind:
        """Return the kind of a model's head: int4 costs it more than all layers together."""
        return WeightKind.INT8 if self is WeightKind.INT4 else self

    @property
    def code_dtype(self) -> torch.dtype:
        return _DTYPES[self]

    def stage_bytes(self, chunk: int) -> int:
        """Bytes of 16 rows of `chunk` inputs."""
        return 16 * (chunk * self.bits // 8 + chunk // GROUP * self.num_scales * 2)

    @property
    def num_scales(self) -> int:
        """Return the scales and minima of `GROUP` inputs, which are packed beside the codes."""
        return _NUM_SCALES.get(self, 0)

    def span(self, chunks: int) -> int:
        """Chunks of a stage of the ring, of as many that follow each other."""
        return 1 if self is WeightKind.BF16 else min(chunks, 2)


_DTYPES = {
    WeightKind.BF16: torch.bfloat16,
    WeightKind.E4M3: torch.float8_e4m3fn,
    WeightKind.INT8: torch.int8,
    WeightKind.INT4: torch.uint8,
    WeightKind.Q8_0: torch.int8,
    WeightKind.Q4_0: torch.uint8,
    WeightKind.Q4_1: torch.uint8,
}

_NUM_SCALES = {
    WeightKind.INT4: 1,
    WeightKind.Q8_0: 2,
    WeightKind.Q4_0: 2,
    WeightKind.Q4_1: 4,
}

_BLOCK_KINDS = {
    (WeightKind.INT8, False): WeightKind.Q8_0,
    (WeightKind.INT4, False): WeightKind.Q4_0,
    (WeightKind.INT4, True): WeightKind.Q4_1,
}
"""By the codes of a scale of `BLOCK` inputs, and whether there are minima."""

KINDS = {
    "packed": WeightKind.BF16,
    "fp8": WeightKind.E4M3,
    "int8": WeightKind.INT8,
    "int4": WeightKind.INT4,
}
"""By the names of `--weight-dtype`, of which a GPU has one copy of the weights."""


ROW_KINDS = (WeightKind.E4M3, WeightKind.INT8)
"""Kinds of experts' weights that stay in the checkpoint's layout, with a scale for each row."""


class CodeFormat(NamedTuple):
    """Format of a quantised map: `group` inputs share a scale (0: all of a row), and a minimum.

    A value is code * scale, of int4 (code - 8) * scale, and with minima code * scale + minimum.
    """

    kind: WeightKind
    group: int = 0
    scales: torch.dtype = torch.float32
    has_minima: bool = False

    @property
    def of_head(self) -> CodeFormat:
        """Return the format of a head beside maps of this one."""
        return format_of(self.kind.of_head, self.group)

    @property
    def of_gpu(self) -> CodeFormat:
        """Return the format as a GPU's kernels read it: blocks with scales and minima in fp16."""
        return self._replace(scales=torch.float16) if self.group == BLOCK else self

    def divides(self, inputs: int) -> bool:
        """Return whether rows of so many inputs can have this format."""
        return inputs % max(self.group, 2 if self.kind is WeightKind.INT4 else 1) == 0

    def empty(self, shape_OI: Sequence[int], device: torch.device) -> MapCodes:
        """Return the tensors of a map, which are to be filled."""
        outputs, inputs = shape_OI
        width = inputs // 2 if self.kind is WeightKind.INT4 else inputs
        shape = (outputs, inputs // self.group) if self.group else (outputs,)
        return MapCodes(
            self.kind,
            torch.empty(outputs, width, dtype=self.kind.code_dtype, device=device),
            torch.empty(shape, dtype=self.scales, device=device),
            torch.empty(shape, dtype=self.scales, device=device) if self.has_minima else None,
        )


BLOCKS_OF_8_BITS = CodeFormat(WeightKind.INT8, BLOCK, torch.float16)
"""Format of GGUF's Q8_0, and of blocks that no kernel reads, rounded."""


def format_of(kind: WeightKind, group: int = GROUP) -> CodeFormat:
    """Return the format of a map in a kind; only int4 has groups."""
    if kind is WeightKind.INT4:
        return CodeFormat(kind, group, torch.bfloat16)
    return CodeFormat(kind)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MapCodes:
    """A quantised map row by row, as no kernel reads it.

    Codes are bf16, e4m3 or int8 [O, I], or 4 bits [O, I / 2] bytes with the input of even index in
    the low half. Scales and minima are as `CodeFormat` says, [O] or [O, G].
    """

    kind: WeightKind
    codes: torch.Tensor
    scales: torch.Tensor | None
    minima: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.codes.shape
        return outputs, width * 2 if self.kind is WeightKind.INT4 else width

    @property
    def packed_kind(self) -> WeightKind:
        """Return the kind that a GPU's kernels read the codes as, in a `CodeFormat.of_gpu`."""
        if self.scales is None or self.scales.dtype is not torch.float16:
            assert self.minima is None, "only blocks have minima"
            return self.kind
        return _BLOCK_KINDS[self.kind, self.minima is not None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of the map, by name."""
        found = {"codes": self.codes, "scales": self.scales, "minima": self.minima}
        return {name: each for name, each in found.items() if each is not None}

    def values(self) -> torch.Tensor:
        """Return one code for each input, [O, I]."""
        if self.kind is not WeightKind.INT4:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)

    def dequantised(self) -> torch.Tensor:
        """Return the map in float32, [O, I]."""
        values_OI = self.values().float()
        if self.scales is None:
            return values_OI
        if self.kind is WeightKind.INT4 and self.minima is None:
            values_OI -= 8.0
        groups = self.scales[0].numel()
        groups_OGE = torch.unflatten(values_OI, 1, (groups, -1))
        exact_OGE = groups_OGE * self.scales.float().view(-1, groups, 1)
        if self.minima is not None:
            exact_OGE += self.minima.float().view(-1, groups, 1)
        return exact_OGE.flatten(1)


def map_codes(weights_OI: torch.Tensor, code_format: CodeFormat) -> MapCodes:
    """Quantise a map to a `format_of` or blocks of 8 bits; every device gives the same bits."""
    kind = code_format.kind
    if code_format == BLOCKS_OF_8_BITS:
        return MapCodes(kind, *_blocks_of_8_bits(weights_OI))
    if kind is WeightKind.BF16:
        return MapCodes(kind, weights_OI, None)
    if kind is WeightKind.INT4:
        values_OI, scale_OG = _int4(weights_OI, code_format.group)
        return MapCodes(kind, values_OI[:, ::2] | values_OI[:, 1::2] << 4, scale_OG)
    return MapCodes(kind, *_eight_bits(weights_OI, kind))


def _eight_bits(weights_OI: torch.Tensor, kind: WeightKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and float32 scales [O] that reach each row's largest weight."""
    most = _E4M3_MOST if kind is WeightKind.E4M3 else _INT8_MOST
    scale_O = weights_OI.float().abs().amax(1).clamp_min(_LEAST_SCALE) / most
    exact_OI = (weights_OI.float() / scale_O[:, None]).clamp(-most, most)
    codes_OI = exact_OI if kind is WeightKind.E4M3 else exact_OI.round()
    return codes_OI.to(kind.code_dtype), scale_O


def _blocks_of_8_bits(weights_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and fp16 scales [O, G] by which each group's largest weight has the code -128.

    Where that weight is -16 or -32 steps, as in Q5_0 and Q6_K, steps are whole codes.
    """
    groups_OGE = torch.unflatten(weights_OI.float(), 1, (-1, BLOCK))
    low_OG, high_OG = groups_OGE.amin(2), groups_OGE.amax(2)
    scale_OG = (torch.where(high_OG > -low_OG, high_OG, low_OG) / -128.0).half()
    exact_OGE = (groups_OGE / scale_OG.float()[..., None]).round_().clamp_(-128.0, 127.0)
    return exact_OGE.nan_to_num_(0.0).to(torch.int8).flatten(1), scale_OG  # a scale may be 0


def _int4(weights_OI: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes 0 to 15, 8 above the value, and the bf16 scales [O, G] of the least error."""
    groups_OGE = torch.unflatten(weights_OI.float(), 1, (-1, group))
    largest_OG = groups_OGE.abs().amax(2).clamp_min(_LEAST_SCALE)
    best_OG = torch.full_like(largest_OG, torch.inf)
    scale_OG = torch.zeros_like(largest_OG, dtype=torch.bfloat16)
    for shrink in _INT4_SHRINKS:
        tried_OG = (largest_OG * (shrink / _INT4_MOST)).bfloat16()
        values_OGE = _rounded4(groups_OGE, tried_OG)
        error_OGE = (values_OGE * tried_OG.float()[..., None] - groups_OGE) ** 2
        while error_OGE.shape[2] > 1:  # in an order that no device chooses for itself
            half = error_OGE.shape[2] // 2
            error_OGE = error_OGE[..., :half] + error_OGE[..., half:]
        error_OG = error_OGE[..., 0]
        is_better_OG = error_OG < best_OG
        best_OG = torch.where(is_better_OG, error_OG, best_OG)
        scale_OG = torch.where(is_better_OG, tried_OG, scale_OG)
    return (_rounded4(groups_OGE, scale_OG) + 8.0).to(torch.uint8).flatten(1), scale_OG


def _rounded4(groups_OGE: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    return (groups_OGE / scale_OG.float()[..., None]).round().clamp(-8.0, 7.0)
