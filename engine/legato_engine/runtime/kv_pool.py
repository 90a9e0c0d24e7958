"""How large the KV pool is and its allocation."""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.models.model import KVCache, Model

_SHARED_PREFIXES = 8  # full contexts kept beside the running rows for prefixes in the cache


def default_num_pages(max_context: int, page_size: int, max_running: int) -> int:
    """Pages for `max_running` full contexts, some shared prefixes, and the scratch page."""
    return (max_running + _SHARED_PREFIXES) * -(-max_context // page_size) + 1


def allocate(model: Model, device: Device, num_pages: int, page_size: int) -> KVCache:
    """Zeroed pages of all layers; page 0 is scratch."""
    shape = (model.num_layers, num_pages, page_size, model.num_kv_heads, model.head_dim)
    return KVCache(
        torch.zeros(shape, dtype=model.dtype, device=device.torch_device),
        torch.zeros(shape, dtype=model.dtype, device=device.torch_device),
    )


def decode_buckets(device: Device, max_running: int) -> tuple[int, ...]:
    """Decode batch sizes, doubling up to `max_running`.

    The CPU starts at the row block that `ops.linear` pads to anyway.
    """
    sizes = [min(8 if device.torch_device.type == "cpu" else 1, max_running)]
    while sizes[-1] < max_running:
        sizes.append(min(sizes[-1] * 2, max_running))
    return tuple(sizes)
