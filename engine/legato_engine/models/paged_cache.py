"""Paged keys and values, and the positions of a pass in them.

Shape legend: T tokens of one sequence, B rows of one token, M pages of one sequence.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.layers.lora import AdaptedRows


@dataclasses.dataclass(slots=True)
class KVCache:
    """Paged keys and values of all layers.

    `k_LNHSE`, `v_LNHSE`: layer, page, kv head, position within the page, head dim; of the model's
    dtype, or e4m3 in units of `scale_L2` (float32; of keys and of values). Page 0 is scratch:
    padding rows write to it, and its contents are never used.
    """

    k_LNHSE: torch.Tensor
    v_LNHSE: torch.Tensor
    scale_L2: torch.Tensor | None = None

    def layer(self, index: int) -> LayerCache:
        scale_2 = None if self.scale_L2 is None else self.scale_L2[index]
        return LayerCache(self.k_LNHSE[index], self.v_LNHSE[index], scale_2)

    @property
    def page_size(self) -> int:
        return self.k_LNHSE.shape[3]


@dataclasses.dataclass(slots=True)
class DecodeBatch:
    """Positions and page ids (int64) of single-token rows; `adapters` None: no row has one."""

    positions_B: torch.Tensor
    page_table_BM: torch.Tensor
    adapters: AdaptedRows | None = None


@dataclasses.dataclass(slots=True)
class Chunk:
    """Tokens of one sequence in a pass of fixed shape; those of padding have page 0, position 0.

    `positions_T` and their pages `page_T` are int64; `place_2` (int64) is the first position and
    the number of tokens before the padding; `pages_M` cover all positions up to the last.
    """

    place_2: torch.Tensor
    positions_T: torch.Tensor
    page_T: torch.Tensor
    pages_M: torch.Tensor
    adapters: AdaptedRows | None = None


@dataclasses.dataclass(slots=True)
class PrefillSpan:
    """Consecutive positions of one sequence; `pages_M` int64 covers `[0, start + T)`.

    `bidirectional`: all attend to each other (image prefix, `start` 0); else causal.
    """

    start: int
    pages_M: torch.Tensor
    bidirectional: bool
    adapters: AdaptedRows | None = None
