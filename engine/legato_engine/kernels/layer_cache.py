"""One layer's keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch  # frontends import this module indirectly, and never load torch


class LayerCache(NamedTuple):
    """Pages of keys and of values, in the computation's dtype, or in e4m3 in units of `scale_2`.

    N pages, H heads, S positions, E head dim. `scale_2` (float32): of keys, of values.
    """

    k_NHSE: torch.Tensor
    v_NHSE: torch.Tensor
    scale_2: torch.Tensor | None = None
