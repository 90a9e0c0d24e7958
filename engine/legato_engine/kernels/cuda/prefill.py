"""Kernels for many tokens: rotation with the write to pages, sums, and copies of pages.

Shape legend as in `kernels.ops`, but T tokens of each sequence, R rotated pairs of a head (16), K
copies.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda.module import Kernel, Module, made_on

SOURCE = "prefill.cu"

_HEAD_DIM = 64
_ROTATED_PAIRS = 16
_THREADS = 256
_VALUES_PER_LOAD = 8
_ALIGNMENT = 16  # bytes of an access


def defines(num_heads: int, page_size: int, kv_bytes: int = 2) -> dict[str, int]:
    return {"HEADS": num_heads, "PAGE": page_size, "KV_BYTES": kv_bytes}


def can_rotate(qkv: torch.Tensor, cos_PR: torch.Tensor, k_NHSE: torch.Tensor) -> bool:
    """Return whether `rotate_and_cache` supports these tensors, `qkv` [..., E] in any view.

    Values and sines are like keys and cosines.
    """
    return (
        is_plain(qkv)
        and (is_plain(k_NHSE) or _is_e4m3(k_NHSE))
        and qkv.shape[-1] == _HEAD_DIM
        and cos_PR.shape[-1] == _ROTATED_PAIRS
        and cos_PR.dtype is torch.float32
        and cos_PR.is_contiguous()
    )


def rotate_and_cache(
    qkv_CT3HE: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    start: int | torch.Tensor,
    pages_CM: torch.Tensor,
    k_NHSE: torch.Tensor,
    v_NHSE: torch.Tensor,
    scale_2: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys in place; write keys and values from position `start` on.

    `start` may be int64 [2] on the device: then it holds the number of tokens, too, and later ones
    are padding, which stays as it is. Within a graph it must not change.
    `pages_CM` is int64 with contiguous rows. The bits are those of `reference.rotate` and, with
    e4m3 caches, of `pages.quantise`; keys and values then become, in place, what is read back.
    """
    num_sequences, count, _, num_heads, _ = qkv_CT3HE.shape
    page_size, kv_bytes = k_NHSE.shape[2], k_NHSE.element_size()
    kernel = made_on(qkv_CT3HE.device, _Kernels, num_heads, page_size, kv_bytes).rotate_and_cache
    threads = count * num_heads * (_HEAD_DIM // _VALUES_PER_LOAD)
    place, known = (None, start) if isinstance(start, int) else (start, 0)
    tensors = qkv_CT3HE, cos_PR, sin_PR, pages_CM, k_NHSE, v_NHSE, scale_2, place
    _launch(kernel, threads, (*tensors, known, count, pages_CM.stride(0)), num_sequences)


def can_add(*terms: torch.Tensor) -> bool:
    first = terms[0]
    return first.numel() % _VALUES_PER_LOAD == 0 and all(
        is_plain(term) and term.shape == first.shape for term in terms
    )


def add3(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Sum in float32, rounded once."""
    out = torch.empty_like(x)
    loads = x.numel() // _VALUES_PER_LOAD
    _launch(made_on(x.device, _Kernels, 1, 1, 2).add3, loads, (x, y, z, out, loads))
    return out


def can_copy(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor) -> bool:
    page_bytes = k_LNHSE[0, 0].numel() * k_LNHSE.element_size()
    return page_bytes % _ALIGNMENT == 0 and all(
        x.device.type == "cuda" and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0
        for x in (k_LNHSE, v_LNHSE)
    )


def copy_pages(k_LNHSE: torch.Tensor, v_LNHSE: torch.Tensor, pairs_K2: torch.Tensor) -> None:
    """Copy cached pages; the pairs are contiguous. Can be captured."""
    num_layers, num_pages = k_LNHSE.shape[:2]
    page_loads = k_LNHSE[0, 0].numel() * k_LNHSE.element_size() // _ALIGNMENT
    kernel = made_on(k_LNHSE.device, _Kernels, 1, 1, 2).copy_pages
    operands = (k_LNHSE, v_LNHSE, pairs_K2, num_pages, page_loads)
    grid = (-(-page_loads // _THREADS), num_layers, 2 * len(pairs_K2))
    kernel.launch(grid, _THREADS, operands, overlap=True)


def is_plain(x: torch.Tensor) -> bool:
    """Return whether kernels can read and write bf16 in whole accesses."""
    return (
        x.device.type == "cuda"
        and x.dtype is torch.bfloat16
        and x.is_contiguous()
        and x.data_ptr() % _ALIGNMENT == 0
    )


def _is_e4m3(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype is torch.float8_e4m3fn and x.is_contiguous()


class _Kernels:
    def __init__(self, num_heads: int, page_size: int, kv_bytes: int) -> None:
        module = Module(SOURCE, defines(num_heads, page_size, kv_bytes))
        self.rotate_and_cache = module.kernel("rotate_and_cache")
        self.add3 = module.kernel("add3")
        self.copy_pages = module.kernel("copy_pages")


def _launch(
    kernel: Kernel, threads: int, operands: tuple[torch.Tensor | int | None, ...], rows: int = 1
) -> None:
    grid = (-(-threads // _THREADS), rows, 1)
    kernel.launch(grid, _THREADS, operands, overlap=True)
