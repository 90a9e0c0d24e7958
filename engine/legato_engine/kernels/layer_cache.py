"""One layer's keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch  # frontends import what imports this module, and they never load torch


class LayerCache(NamedTuple):
    """Pages [N, H, S, E] of keys and of values: of the dtype of what is computed, or of e4m3.

    N pages, H heads, S positions per page, E head dim. Those of e4m3 are in units of `scale_2`
    (float32: the keys', the values'), which others have none of.
    """

    k_NHSE: torch.Tensor
    v_NHSE: torch.Tensor
    scale_2: torch.Tensor | None = None
