"""Fused attention: its source's registers hold what they must, and its tiles are every head's."""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda.capability import gpu_of_arch
from legato_engine.kernels.cuda.fused_attention import (
    SOURCE,
    WARP_SOURCE,
    cut_tiles,
    defines,
    shared_bytes,
    warp_defines,
    warp_shared,
)
from legato_engine.kernels.cuda.module import compile_source

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages

MOST_SHARED = 227 * 1024  # bytes of a thread block on Hopper
FEW = 256
SIZES = [(72, 16, 729), (64, 32, 730), (64, 5, 129), (72, 4, 1000)]


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("head_dim", "num_heads", "num_tokens"), SIZES)
def test_nothing_is_kept_in_local_memory(tmp_path, monkeypatch, head_dim, num_heads, num_tokens):
    """Scores, weights and results stay in registers, for images' sizes and larger ones."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    constants = defines(head_dim, num_heads, num_tokens)
    found = usages(compile_source(SOURCE, constants, "sm_90a"))
    # Between two blocks of keys there is no loop to speak of, and a compiler may plan less well.
    assert found["fused_attention"].stack <= (128 if num_tokens < FEW else 0)
    assert shared_bytes(constants) + found["fused_attention"].static <= MOST_SHARED


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("head_dim", "num_heads", "num_tokens"), SIZES[:2])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_of_warps_stays_in_registers(
    tmp_path, monkeypatch, arch, head_dim, num_heads, num_tokens
):
    """On every architecture; two thread blocks share a multiprocessor."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    constants = warp_defines(head_dim, num_heads, num_tokens)
    found = usages(compile_source(WARP_SOURCE, constants, arch))["warp_attention"]
    assert found.stack == 0
    assert found.registers <= 255
    assert 2 * (warp_shared(head_dim) + found.static) <= gpu_of_arch(arch).shared


@pytest.mark.parametrize("tokens", [129, 729, 730, 1000])
@pytest.mark.parametrize("blocks", [1, 132])
def test_tiles_cover_every_head_in_no_more_time(tokens, blocks):
    """Heads are wide or narrow as a whole; the last round is never longer than with wide ones."""
    wide_of_head, narrow_of_head = -(-tokens // 192), -(-tokens // 128)
    for heads in (*range(1, 40), 80, 144, 208, 416):
        tiles, wide = cut_tiles(heads, tokens, 3, blocks)
        wide_heads, rest = divmod(wide, wide_of_head)
        narrow_heads, none = divmod(tiles - wide, narrow_of_head)
        assert rest == none == 0
        assert wide_heads + narrow_heads == heads
        wide_rounds, rounds = -(-wide // blocks), -(-tiles // blocks)
        assert 4 * wide_rounds + 3 * (rounds - wide_rounds) <= 4 * -(
            -heads * wide_of_head // blocks
        )


def test_nine_crops_leave_a_narrow_round():
    """Sixteen heads each on 132 processors: four rounds of wide tiles, and one of narrow ones."""
    tiles, wide = cut_tiles(9 * 16, 729, 3, 132)
    assert wide == 4 * 132
    assert tiles - wide == 72
