"""Attention of every token to every token of its sequence, by products of warpgroups or of warps.

Shape legend: B sequences, T tokens, H heads, E head dim.
"""

from __future__ import annotations

import functools

import torch

from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import Module, TensorMap, made_on, tensor_map

SOURCE, WARP_SOURCE = "fused_attention.cu", "warp_attention.cu"

_HEAD_DIMS = (64, 72)
_ALIGNMENT = 16  # bytes of a copy
_VALUES_PER_COPY = 8
_GROUPS = 3  # multiplying warpgroups, of 64 queries each
_KEYS = 96  # of a block
_STAGES = 4
_BOX = 32  # rows of a copy
_WIDE, _NARROW = 64, 16  # dimensions of a copy
_NARROW_TILE = 0.75  # relative time of a tile in which one of three warpgroups has no queries


def defines(head_dim: int, num_heads: int, num_tokens: int) -> dict[str, int]:
    return {
        "HEAD": head_dim,
        "HEADS": num_heads,
        "TOKENS": num_tokens,
        "GROUPS": _GROUPS,
        "KEYS": _KEYS,
        "STAGES": _STAGES,
        "BOX": _BOX,
    }


def shared_bytes(constants: dict[str, int]) -> int:
    has_tail = constants["HEAD"] > _WIDE
    row = 2 * (_WIDE + has_tail * _NARROW)
    value = 2 * (_WIDE + has_tail * _WIDE)
    stages = constants["STAGES"]
    barriers = 8 * (2 + 4 * stages)
    queries = 2 * 64 * constants["GROUPS"] * row
    return queries + stages * constants["KEYS"] * (row + value) + barriers


class FusedAttention:
    """The kernel for one shape of sequences, on the current device."""

    def __init__(self, head_dim: int, num_heads: int, num_tokens: int) -> None:
        constants = defines(head_dim, num_heads, num_tokens)
        module = Module(SOURCE, constants, own=True)
        self._kernel = module.kernel("fused_attention", shared=shared_bytes(constants))
        self._threads = 128 * (constants["GROUPS"] + 1)
        self._groups = constants["GROUPS"]
        self._box = constants["BOX"]
        self._has_tail = constants["HEAD"] > _WIDE
        device = torch.cuda.current_device()
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self, q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor
    ) -> torch.Tensor:
        count, tokens, heads, _ = q_BTHE.shape
        out_BTHE = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=q_BTHE.device)
        tiles = cut_tiles(count * heads, tokens, self._groups, self._blocks)
        query, key, value = (self._map(x, _WIDE) for x in (q_BTHE, k_BTHE, v_BTHE))
        tails = (query, key)
        if self._has_tail:
            tails = (self._map(q_BTHE, _NARROW), self._map(k_BTHE, _NARROW))
        operands = (query, tails[0], key, tails[1], value, out_BTHE, *tiles)
        grid = (min(tiles[0], self._blocks), 1, 1)
        self._kernel.launch(grid, self._threads, operands, overlap=True)
        return out_BTHE

    def _map(self, x_BTHE: torch.Tensor, dims: int) -> TensorMap:
        return tensor_map(x_BTHE, (1, self._box, 1, dims))


_WARP_KEYS = 64
_WARP_QUERIES = 128  # of a thread block
_WARP_THREADS = 128


def warp_defines(head_dim: int, num_heads: int, num_tokens: int) -> dict[str, int]:
    return {"HEAD": head_dim, "HEADS": num_heads, "TOKENS": num_tokens, "KEYS": _WARP_KEYS}


def warp_shared(head_dim: int) -> int:
    """Bytes of shared memory: two blocks of keys and values."""
    stride = -(-head_dim // 16) * 16 + 8
    return 2 * 2 * _WARP_KEYS * stride * 2


class WarpAttention:
    """The kernel of warps' products, for one shape of sequences."""

    def __init__(self, head_dim: int, num_heads: int, num_tokens: int) -> None:
        constants = warp_defines(head_dim, num_heads, num_tokens)
        shared = warp_shared(head_dim)
        self._kernel = Module(WARP_SOURCE, constants).kernel("warp_attention", shared=shared)

    def __call__(
        self, q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor
    ) -> torch.Tensor:
        count, tokens, heads, _ = q_BTHE.shape
        out_BTHE = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=q_BTHE.device)
        sequence, token = q_BTHE.stride()[:2]
        grid = (count * heads * -(-tokens // _WARP_QUERIES), 1, 1)
        operands = (q_BTHE, k_BTHE, v_BTHE, out_BTHE, token, sequence)
        self._kernel.launch(grid, _WARP_THREADS, operands, overlap=True)
        return out_BTHE


@functools.cache
def cut_tiles(heads: int, tokens: int, groups: int, blocks: int) -> tuple[int, int]:
    """Return the number of tiles, and how many of them (of the first heads) are wide.

    A wide tile has 64 queries for each warpgroup, a narrow one 64 less; narrow ones shorten a last
    round of few thread blocks.
    """
    wide_of_head, narrow_of_head = (-(-tokens // (64 * each)) for each in (groups, groups - 1))

    def tiles(narrow_heads: int) -> tuple[int, int]:
        wide = (heads - narrow_heads) * wide_of_head
        return wide + narrow_heads * narrow_of_head, wide

    def time(narrow_heads: int) -> float:
        rounds, wide_rounds = (-(-number // blocks) for number in tiles(narrow_heads))
        return wide_rounds + (rounds - wide_rounds) * _NARROW_TILE

    return tiles(min(range(heads + 1), key=time))


def can_attend(q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor) -> bool:
    device = q_BTHE.device
    if q_BTHE.dtype is not torch.bfloat16 or not runs(Kernels.TOWER_ATTENTION, device):
        return False
    tokens, _, head_dim = q_BTHE.shape[1:]
    strides = q_BTHE.stride()
    return (
        head_dim in _HEAD_DIMS
        and tokens > _KEYS
        and strides[2:] == (head_dim, 1)
        and strides[1] % _VALUES_PER_COPY == 0
        and strides[0] % _VALUES_PER_COPY == 0
        and all(_is_like(x, q_BTHE) for x in (q_BTHE, k_BTHE, v_BTHE))
    )


def attend(q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = q_BTHE.shape[1:]
    if has_warpgroups(q_BTHE.device):
        kernel = made_on(q_BTHE.device, FusedAttention, head_dim, heads, tokens)
        return kernel(q_BTHE, k_BTHE, v_BTHE)
    warps = made_on(q_BTHE.device, WarpAttention, head_dim, heads, tokens)
    return warps(q_BTHE, k_BTHE, v_BTHE)


def has_warpgroups(device: torch.device) -> bool:
    return runs(Kernels.TOWER_WARPGROUPS, device)


def _is_like(x: torch.Tensor, other: torch.Tensor) -> bool:
    same = x.shape == other.shape and x.stride() == other.stride() and x.dtype is other.dtype
    return same and x.data_ptr() % _ALIGNMENT == 0
