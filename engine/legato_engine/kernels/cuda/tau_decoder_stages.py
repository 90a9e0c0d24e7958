"""Sizes of the kernels with gains and experts, and their shared memory."""

from __future__ import annotations

import dataclasses

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes

MAX_EXPERTS = 64
MAX_ACTIVE = 8

BUDGET = 221 * 1024  # bytes of shared memory, which leave room for those of `gains`
_MOST_STAGES = 6
_STEPS = {1: (8, 3), 2: (16, 2), 3: (16, 2), 4: (16, 2)}
"""By tiles: tokens of one stage of inputs of `experts_out`, and the number of its stages."""

_TERM = 16 * 4  # bytes of a pair in a thread block of `experts_out`


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`weight_bytes` is 2 (bf16) or 1 (e4m3)."""

    num_experts: int
    num_active: int
    inner_dim: int
    weight_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TauSizes:
    """Constants of the kernels; `exact` selects the gains' gelu."""

    decoder: DecoderSizes
    experts: ExpertSizes
    exact: bool


def supported(sizes: ExpertSizes) -> bool:
    return (
        sizes.num_experts % 16 == 0
        and sizes.num_active <= sizes.num_experts <= MAX_EXPERTS
        and sizes.num_active <= MAX_ACTIVE
        and sizes.inner_dim % skinny_gemm.GROUP == 0
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of `width` weights in a stage of `row_major_gemm.cuh`."""

    width: int
    size: int

    @property
    def chunk(self) -> int:
        most = 2048 // self.size // skinny_gemm.GROUP
        return next(g * skinny_gemm.GROUP for g in range(most, 0, -1) if self.width % (g * 64) == 0)

    @property
    def together(self) -> int:
        if self.chunk < self.width:
            return 1
        return 2 if self.chunk * self.size > 1024 else 4

    @property
    def stage(self) -> int:
        """Bytes of 16 rows, each copy followed by a gap."""
        return 16 // self.together * (self.together * self.chunk * self.size + 64)

    @property
    def padding(self) -> int:
        return 8 if self.size == 1 else skinny_gemm.PAD


def up_stages(sizes: TauSizes, batch: int) -> tuple[int, int]:
    """As many stages as fit beside all tokens' inputs and sums, and bytes of shared memory."""
    rows = Rows(sizes.decoder.dim, sizes.experts.weight_bytes)
    inputs = skinny_gemm.ring(batch * (rows.width + rows.padding), 1)
    return _stages(rows.stage, inputs + _sums(batch))


def out_stages(sizes: TauSizes, batch: int) -> tuple[int, int]:
    """The same beside a ring of inputs, sums and terms."""
    experts, tiles = sizes.experts, skinny_gemm.tiles_for(batch)
    down, proj = Rows(experts.inner_dim, experts.weight_bytes), Rows(sizes.decoder.dim, 2)
    tokens, steps = _STEPS[tiles]
    inputs = max(rows.chunk + rows.padding for rows in (down, proj))
    beside = skinny_gemm.ring(min(batch, tokens) * inputs, steps) + _sums(batch)
    terms = 8 * tiles * (experts.num_active + 1) * _TERM
    return _stages(max(down.stage, proj.stage), beside + terms)


def _sums(batch: int) -> int:
    """Bytes of `StepSums` in experts.cu."""
    few = skinny_gemm.tiles_for(batch) < skinny_gemm.TILES[-1]
    return skinny_gemm.block_sums(batch, 2 if few else 1)


def _stages(num_bytes: int, beside: int) -> tuple[int, int]:
    stages = min(_MOST_STAGES, (BUDGET - beside - 128) // num_bytes)
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
        "EXPERT_BYTES": sizes.experts.weight_bytes,
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
        "EXPERT_BYTES": experts.weight_bytes,
        "MIXED": sizes.decoder.mixed_dim,
        "INPUT_STAGES": _STEPS[tiles][1],
        "TILES": tiles,
    }
