"""The CUDA source of fused attention, by NVRTC: its registers hold what they must."""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda.compiler import compile_source
from legato_engine.kernels.cuda.fused_attention import SOURCE, defines, shared_bytes

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import usages

MOST_SHARED = 227 * 1024  # bytes of a thread block on Hopper
FEW = 256
SIZES = [(72, 16, 729), (64, 32, 730), (64, 5, 129), (72, 4, 1000)]


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("head_dim", "num_heads", "num_tokens"), SIZES)
def test_nothing_is_kept_in_local_memory(tmp_path, monkeypatch, head_dim, num_heads, num_tokens):
    """Scores, weights and results stay in registers, of a picture's sizes and larger ones."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    constants = defines(head_dim, num_heads, num_tokens)
    found = usages(compile_source(SOURCE, constants, "sm_90a"))
    # Between two blocks of keys there is no loop to speak of, and a compiler may plan less well.
    assert found["fused_attention"].stack <= (128 if num_tokens < FEW else 0)
    assert shared_bytes(constants) + found["fused_attention"].static <= MOST_SHARED
