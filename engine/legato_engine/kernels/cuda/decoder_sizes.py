"""A decoder's sizes and packed weights; shape legend as in `decoder`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.attention import AttentionSizes


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


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, bf16 but `folded_in`; maps are packed, the norm is folded into the first."""

    weights_in: torch.Tensor
    folded_in: torch.Tensor
    weights_out: torch.Tensor
    proj_bias: torch.Tensor
    fc2_bias: torch.Tensor


class Form(NamedTuple):
    """What else the kernels are compiled for.

    Thread blocks of a cluster read the inputs of `layer_in` once (`x_cluster`). `spread` thread
    blocks have a part each of the inputs of `layer_out`, for as many blocks of its rows, and those
    of a cluster (`out_cluster`) read the same part once.
    """

    tiles: int
    x_cluster: int
    spread: int
    out_cluster: int


def decode_form(sizes: DecoderSizes, batch: int) -> Form:
    shared = skinny_gemm.cluster(batch)
    spread = sizes.parts if shared > 1 else 1
    out_cluster = shared if spread > 1 and sizes.dim % (16 * spread * shared) == 0 else 1
    return Form(skinny_gemm.tiles_for(batch), shared, spread, out_cluster)


def layer_defines(sizes: DecoderSizes, tiles: int) -> dict[str, int]:
    return {
        "DIM": sizes.dim,
        "FF": sizes.ff_dim,
        "HEADS": sizes.num_heads,
        "ROTARY": sizes.rotary_dim,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "PARTS": sizes.parts,
        "TILES": tiles,
    }
