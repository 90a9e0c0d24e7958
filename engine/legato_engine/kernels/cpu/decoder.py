"""Decoder layers on the CPU, all in one call, with packed weights.

Shape legend: T rows, I and O inputs and outputs of a map.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch

from legato_engine.kernels.cpu import library as native
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.map_codes import MapCodes, WeightKind
from legato_engine.kernels.parameters import AdapterRows, LowRankStack

KINDS = {
    "float32": 0,
    "bfloat16": 1,
    "int8": 2,
    "int4": 3,
    "int8_single": 6,
    "int4_single": 7,
}
"""Formats of panels; those of integers have scales of 16 bits, or float32 ones (`single`)."""

_ALIGNMENT = 64
_BLOCK = 32
_LARGEST_HALF = 65504.0


class PanelWeight:
    """A `PackedWeight` of a kind of `KINDS`; a row's bits depend on that row only."""

    def __init__(self, library: Library, weight: torch.Tensor | MapCodes, kind: str) -> None:
        """Round a weight to its kind, or pack codes, whose `panel_kind` it is."""
        self.out_features, self.in_features = weight.shape
        self.kind = kind
        self._library = library
        described = self.described(None)
        size = library.packed_bytes(ctypes.byref(described))
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        self._data = memory[-memory.data_ptr() % _ALIGNMENT :][:size]
        if isinstance(weight, MapCodes):
            self._pack_codes(weight, described)
            return
        weight_OI = weight.detach().contiguous()
        if weight_OI.dtype is not torch.bfloat16:
            weight_OI = weight_OI.float()
        library.pack(
            library.pool(),
            ctypes.byref(described),
            weight_OI.data_ptr(),
            weight_OI.dtype is torch.bfloat16,
            self._data.data_ptr(),
        )

    def _pack_codes(self, codes: MapCodes, described: native.LinearStruct) -> None:
        assert codes.scales is not None, "only floats have no scales"
        values_OI, scales = codes.values().contiguous(), codes.scales.float().contiguous()
        minima = codes.minima
        if codes.kind is WeightKind.INT4:
            minima = -8.0 * scales if minima is None else minima.float().contiguous()
        groups = scales[0].numel()
        stored = native.CodesStruct(
            values_OI.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            *(self.in_features // groups, groups, self.in_features, self.out_features),
        )
        library = self._library
        library.pack_codes(
            library.pool(), *map(ctypes.byref, (described, stored)), self._data.data_ptr()
        )

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def described(self, bias_O: torch.Tensor | None) -> native.LinearStruct:
        """`bias_O` is float32 and outlives the result."""
        data = self._data.data_ptr() if hasattr(self, "_data") else None
        bias = None if bias_O is None else bias_O.data_ptr()
        return native.LinearStruct(
            data, bias, KINDS[self.kind], self.in_features, self.out_features
        )

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        dtype, rows_TI = rows_TI.dtype, rows_TI.float().contiguous()
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        out_TO = torch.empty(len(rows_TI), self.out_features)
        self._library.multiply(
            self._library.pool(),
            ctypes.byref(self.described(bias_O)),
            rows_TI.data_ptr(),
            len(rows_TI),
            out_TO.data_ptr(),
        )
        return out_TO.to(dtype)

    def rows(self, outputs_T: torch.Tensor) -> torch.Tensor:
        """Weights of some outputs, float32 [T, I]."""
        outputs_T = outputs_T.contiguous()
        rows_TI = torch.empty(len(outputs_T), self.in_features)
        described = ctypes.byref(self.described(None))
        self._library.unpack(described, outputs_T.data_ptr(), len(outputs_T), rows_TI.data_ptr())
        return rows_TI


def panel_kind(codes: MapCodes) -> str | None:
    """Return the kind of panels that keep the values of codes, or None."""
    if codes.scales is None or codes.kind not in (WeightKind.INT8, WeightKind.INT4):
        return None
    if codes.scales.dim() > 1 and codes.shape[1] // codes.scales.shape[1] % _BLOCK:
        return None
    if codes.kind is WeightKind.INT8:
        if codes.minima is not None:
            return None
        return "int8" if codes.scales.dtype is torch.float16 else "int8_single"
    is_half = codes.scales.dtype is torch.float16
    if is_half and codes.minima is None:  # which are -8 times the scales
        is_half = bool(codes.scales.float().abs().max() <= _LARGEST_HALF / 8)
    return "int4" if is_half else "int4_single"


# ---------------------------------------------------------------- decoder

# A row's bits depend neither on the other rows of a call nor on the number of threads, and not on
# how a sequence is cut into calls. The residual stream is float32 within a call.
#
# Shape legend as in `ops`.

_CHUNK = 512
"""Rows of a sequence in a call, which bounds the memory between layers."""

_QUERIES = 24
"""Queries of adjacent rows of a sequence that read a head of keys and values together."""

LANES = 8
"""Dims of a head are multiples of this."""

_CACHES = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuNorm:
    """An RMS norm, with a bias a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuMap:
    """A packed weight and its bias."""

    weight: PanelWeight
    bias: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuLayer:
    """A layer's norms and maps; without `next_norm` attention and MLP read the same norm.

    `query_norm` and `key_norm` are of each head.
    """

    norm: CpuNorm
    qkv: CpuMap
    out: CpuMap
    up: CpuMap
    down: CpuMap
    next_norm: CpuNorm | None = None
    query_norm: CpuNorm | None = None
    key_norm: CpuNorm | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuLowRank:
    """Adapters of the maps of all layers, contiguous, and the slot of each row.

    Those of a map follow each other over its outputs; none: the map is not adapted. One slot is
    that of all rows.
    """

    rows: AdapterRows
    qkv: Sequence[LowRankStack] = ()
    out: Sequence[LowRankStack] = ()
    up: Sequence[LowRankStack] = ()
    down: Sequence[LowRankStack] = ()


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, R/2] float32 of rows or of positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class CpuRows:
    """Per-row inputs of a call, in addition to the activations.

    `angles`: of each row; None: those of its position.
    """

    k_LNHSE: torch.Tensor
    v_LNHSE: torch.Tensor
    adapters: CpuLowRank | None = None
    angles: Angles | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CpuSizes:
    """Decoder sizes; `gated` layers compute silu of the first half of `up` times the second."""

    heads: int
    key_heads: int
    head_dim: int
    gated: bool


class CpuDecoder:
    """Runs the layers on rows of any sequences."""

    def __init__(
        self,
        library: Library,
        layers: Sequence[CpuLayer],
        sizes: CpuSizes,
        angles: Angles,
    ) -> None:
        """`angles`: of all positions; R may be 0."""
        self._library = library
        self.num_layers = len(layers)
        self._head_dim = sizes.head_dim
        self._tile = max(1, _QUERIES * sizes.key_heads // sizes.heads)
        self._fused = (sizes.heads + 2 * sizes.key_heads) * sizes.head_dim
        self._kept: list[object] = [layers]
        table = (native.LayerStruct * len(layers))(*map(self._layer, layers))
        cosines, sines = (each.contiguous() for each in angles)
        self._kept += [table, cosines, sines]
        first = layers[0]
        self._decoder = native.DecoderStruct(
            ctypes.addressof(table),
            *(cosines.data_ptr(), sines.data_ptr()),
            *(len(layers), first.qkv.weight.in_features, first.down.weight.in_features),
            *(sizes.heads, sizes.key_heads, cosines.shape[1]),
            *(sizes.gated, first.next_norm is None),
        )

    def decode(
        self,
        x_BD: torch.Tensor,
        positions_B: torch.Tensor,
        page_table_BM: torch.Tensor,
        rows: CpuRows,
    ) -> torch.Tensor:
        """[B, D] of one token per row; a row whose first page is 0 is padding."""
        lengths_B = torch.where(page_table_BM[:, 0] == 0, 0, positions_B + 1)
        x32_BD = x_BD.to(torch.float32, copy=True).contiguous()
        self._run(x32_BD, positions_B, lengths_B, page_table_BM, rows)
        return x32_BD.to(x_BD.dtype)

    def span(
        self,
        x_TD: torch.Tensor,
        start: int,
        pages_M: torch.Tensor,
        rows: CpuRows,
        *,
        bidirectional: bool,
        caches_only: bool = False,
    ) -> torch.Tensor:
        """[T, D] of consecutive positions of one sequence; of no meaning with `caches_only`."""
        x32_TD = x_TD.to(torch.float32, copy=True).contiguous()
        count = len(x_TD)
        chunk = count if bidirectional else _CHUNK
        for first in range(0, count, chunk):
            part_TD = x32_TD[first : first + chunk]
            begin = start + first
            positions_T = torch.arange(begin, begin + len(part_TD))
            lengths_T = positions_T + 1
            if bidirectional:
                lengths_T = torch.full_like(lengths_T, start + count)
            part = rows
            if rows.angles is not None:
                cosines, sines = (each[first : first + len(part_TD)] for each in rows.angles)
                part = dataclasses.replace(rows, angles=(cosines, sines))
            self._run(part_TD, positions_T, lengths_T, pages_M[None], part, self._tile, caches_only)
        return x32_TD.to(x_TD.dtype)

    def whole(self, x_TD: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        """[T, D] of one sequence that sees all of itself, without a cache.

        Without `angles` of its rows it has no rotations, and the decoder none either.
        """
        x32_TD = x_TD.to(torch.float32, copy=True).contiguous()
        positions_T, pages_1 = torch.arange(len(x_TD)), torch.zeros(1, dtype=torch.int64)
        lengths_T = torch.full_like(positions_T, len(x_TD))
        fused = self._fused
        pages = native.PagesStruct(
            None, None, 0, self._head_dim, fused, 0, len(x_TD), self._head_dim
        )
        step = native.StepStruct(
            *(x32_TD.data_ptr(), positions_T.data_ptr(), lengths_T.data_ptr(), pages_1.data_ptr()),
            *_addresses(angles),
            *(len(x_TD), 0, self._tile, pages, 0, False, _adapters(None)),
        )
        self._call(step)
        return x32_TD.to(x_TD.dtype)

    def _run(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        lengths_T: torch.Tensor,
        tables_TM: torch.Tensor,
        rows: CpuRows,
        tile: int = 1,
        caches_only: bool = False,
    ) -> None:
        """Run the layers in place; a single row of `tables_TM` applies to all rows."""
        k_LNHSE, v_LNHSE = rows.k_LNHSE, rows.v_LNHSE
        layer, page, head, slot, _ = k_LNHSE.stride()
        tables_TM, positions_T = tables_TM.contiguous(), positions_T.contiguous()
        pages = native.PagesStruct(
            *(k_LNHSE.data_ptr(), v_LNHSE.data_ptr(), page, head, slot),
            *(k_LNHSE.dtype is torch.bfloat16, k_LNHSE.shape[3], self._head_dim),
        )
        step = native.StepStruct(
            *(x_TD.data_ptr(), positions_T.data_ptr(), lengths_T.data_ptr(), tables_TM.data_ptr()),
            *_addresses(rows.angles),
            *(len(x_TD), tables_TM.shape[1] if len(tables_TM) > 1 else 0, tile),
            *(pages, layer * k_LNHSE.itemsize, caches_only, _adapters(rows.adapters)),
        )
        self._call(step)

    def _call(self, step: native.StepStruct) -> None:
        decoder, pool = ctypes.byref(self._decoder), self._library.pool()
        self._library.layers(pool, decoder, ctypes.byref(step))

    def _layer(self, layer: CpuLayer) -> native.LayerStruct:
        norms = layer.norm, layer.next_norm, layer.query_norm, layer.key_norm
        maps = layer.qkv, layer.out, layer.up, layer.down
        return native.LayerStruct(*map(self._norm, norms), *map(self._map, maps))

    def _norm(self, norm: CpuNorm | None) -> native.NormStruct:
        if norm is None:
            return native.NormStruct()
        return native.NormStruct(self._floats(norm.weight), self._floats(norm.bias), norm.epsilon)

    def _map(self, each: CpuMap) -> native.LinearStruct:
        bias = None if each.bias is None else each.bias.detach().float().contiguous()
        self._kept.append(bias)
        return each.weight.described(bias)

    def _floats(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        floats = values.detach().float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()


def _addresses(angles: Angles | None) -> tuple[int | None, int | None]:
    if angles is None:
        return None, None
    assert all(each.is_contiguous() and each.dtype is torch.float32 for each in angles)
    return angles[0].data_ptr(), angles[1].data_ptr()


def _adapters(adapters: CpuLowRank | None) -> native.AdaptersStruct:
    if adapters is None:
        return native.AdaptersStruct()
    maps = adapters.qkv, adapters.out, adapters.up, adapters.down
    (first_LSRI, _), *_ = (stack for stacks in maps for stack in stacks)
    slots, ranks = adapters.rows.slot_T, adapters.rows.rank_S
    return native.AdaptersStruct(
        *(native.LowRanksStruct(*map(_low_rank, stacks)) for stacks in maps),
        *(slots.data_ptr(), ranks.data_ptr()),
        *(first_LSRI.shape[1], first_LSRI.shape[2], first_LSRI.dtype is torch.bfloat16),
        len(slots) == 1,
    )


def _low_rank(stack: LowRankStack) -> native.LowRankStruct:
    a_LSRI, b_LSRO = stack
    return native.LowRankStruct(
        a_LSRI.data_ptr(), b_LSRO.data_ptr(), a_LSRI.shape[3], b_LSRO.shape[3]
    )


def takes(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor) -> bool:
    """Return whether a decoder can run on these caches."""
    return (
        k_LNHSE.dtype in _CACHES
        and k_LNHSE.shape[-1] % LANES == 0
        and all(each.is_contiguous() for each in (k_LNHSE, v_LNHSE))
    )
