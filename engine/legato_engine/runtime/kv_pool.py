"""Size and allocation of the KV pool; decode batch sizes."""

from __future__ import annotations

import math
import mmap

import torch

from legato_engine.device.base import Device
from legato_engine.device.host import available_memory
from legato_engine.errors import InvalidField
from legato_engine.models.base import Model
from legato_engine.models.paged_attention import KVCache

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_SHARED_PREFIXES = 8  # full contexts for cached prefixes
_MAX_PREFIXES = 1024  # however much memory there is
_QUESTION_TOKENS = 24
_MIN_DECODE_ROWS = 32  # on a GPU, where prompts run as rows of a step


def num_pages_for(
    model: Model,
    device: Device,
    page_size: int,
    max_running: int,
    fraction: float,
    image_bytes: int = 0,
) -> int:
    """Return the pool's size in pages: `fraction` of the free memory.

    On a CPU it is at most that of all running contexts and a few cached ones. `image_bytes` are
    left to features of images.

    Raises:
        InvalidField: one full context does not fit.
    """
    context = -(-model.max_context // page_size)
    free, most = device.free_memory(), (max_running + _MAX_PREFIXES) * context + 1
    if free is None:
        free, most = available_memory(), (max_running + _SHARED_PREFIXES) * context + 1
    page_bytes = page_size * token_bytes(model)
    pages = int(max(0, free - image_bytes) * fraction) // page_bytes
    if pages <= context:
        features = f" beside {image_bytes / 2**30:.1f} GiB of image features" if image_bytes else ""
        raise InvalidField(
            f"{free / 2**30:.1f} GiB free on {device.name} leave {pages} pages of KV cache"
            f"{features}, one full context needs {context + 1}: raise kv_memory_fraction, "
            "use a smaller dtype, or free memory",
            field="kv_memory_fraction",
        )
    return min(max(pages, max_running + 1), most)  # a page a row; `allocate` refuses too many


def kv_dtype(model: Model) -> torch.dtype:
    """e4m3 if the model has scales for it."""
    return model.dtype if model.kv_scale_L2 is None else torch.float8_e4m3fn


def token_bytes(model: Model) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_dtype(model).itemsize


def allocate(model: Model, device: Device, num_pages: int, page_size: int) -> KVCache:
    """Zeroed pages of all layers; page 0 is scratch. A CPU's take memory when they are first used.

    Raises:
        InvalidField: they need more memory than there is.
    """
    free = device.free_memory()
    free = available_memory() if free is None else free
    needed = num_pages * page_size * token_bytes(model)
    if needed > free:
        raise InvalidField(
            f"the KV cache needs {needed / 2**30:.2f} GiB for {num_pages} pages, and "
            f"{free / 2**30:.2f} GiB are free on {device.name}: lower max_running or max_context, "
            "or free memory",
            field="max_running",
            needed_bytes=needed,
            free_bytes=free,
        )
    shape = (model.num_layers, num_pages, model.num_kv_heads, page_size, model.head_dim)
    keys, values = (_zeros(shape, kv_dtype(model), device.torch_device) for _ in range(2))
    return KVCache(keys, values, model.kv_scale_L2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; on a CPU from small pages handed out on demand.

    A sequence's pages are apart in every layer, so a huge page would be taken for each.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=_PRIVATE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def decode_buckets(device: Device, max_tokens: int) -> tuple[int, ...]:
    """Batch sizes that double up to `max_tokens`.

    A GPU also has 24, the usual length of a question about a cached image, which then takes 10 %
    less time than in a step of 32.
    """
    on_cpu = device.torch_device.type == "cpu"
    most = max_tokens if on_cpu else max(max_tokens, _MIN_DECODE_ROWS)
    sizes = doubling(1, most)
    return sizes if on_cpu else tuple(sorted({*sizes, _QUESTION_TOKENS}))


def doubling(first: int, most: int) -> tuple[int, ...]:
    """List sizes that double from `first` up to `most`, which is the last."""
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)
