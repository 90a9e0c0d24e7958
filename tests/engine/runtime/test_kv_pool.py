"""Batch sizes of decode steps, and the size of the KV pool."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.runtime import kv_pool
from legato_engine.runtime.kv_pool import allocate, decode_buckets, num_pages_for, token_bytes


def device(kind):
    """A stand-in device with what sizes depend on."""
    return types.SimpleNamespace(torch_device=torch.device(kind))


@pytest.mark.parametrize(
    ("kind", "most", "sizes"),
    [
        ("cpu", 6, (1, 2, 4, 6)),
        ("cpu", 48, (1, 2, 4, 8, 16, 32, 48)),
        ("cuda", 2, (1, 2, 4, 8, 16, 24, 32)),
        ("cuda", 160, (1, 2, 4, 8, 16, 24, 32, 64, 128, 160)),
    ],
)
def test_batches_double_up_to_the_most(kind, most, sizes):
    """A GPU has all sizes that a prompt may need, and one for questions between the last two."""
    assert decode_buckets(device(kind), most) == sizes


def moondream3(scale_L2=None):
    """A stand-in model: 192 KiB a position in bfloat16."""
    return types.SimpleNamespace(
        num_layers=24,
        num_kv_heads=32,
        head_dim=64,
        max_context=32768,
        dtype=torch.bfloat16,
        kv_scale_L2=scale_L2,
    )


def test_a_token_takes_its_layers_keys_and_values():
    """A position of Moondream 3 has the right size in either dtype."""
    assert token_bytes(moondream3()) == 192 * 1024
    assert token_bytes(moondream3(torch.ones(24, 2))) == 96 * 1024


def test_e4m3_has_twice_the_pages():
    """A page of 16 positions takes 3 MiB of a GPU's free memory, or half of that in e4m3."""
    gpu = types.SimpleNamespace(name="gpu", free_memory=lambda: 40 * 2**30)
    assert num_pages_for(moondream3(), gpu, 16, 4, 0.5) == 20 * 2**30 // (3 * 2**20)
    assert num_pages_for(moondream3(torch.ones(24, 2)), gpu, 16, 4, 0.5) == 20 * 2**30 * 2 // (
        3 * 2**20
    )


def test_a_context_that_only_e4m3_has_room_for():
    """If one context does not fit in the model's dtype, only scales let the engine start."""
    gpu = types.SimpleNamespace(name="gpu", free_memory=lambda: 4 * 2**30)
    with pytest.raises(InvalidField, match="one full context needs 2049"):
        num_pages_for(moondream3(), gpu, 16, 1, 1.0)
    assert num_pages_for(moondream3(torch.ones(24, 2)), gpu, 16, 1, 1.0) > 2048


def small(max_context=4096):
    """A stand-in model of 128 KiB a position in float32."""
    return types.SimpleNamespace(
        num_layers=16,
        num_kv_heads=8,
        head_dim=128,
        max_context=max_context,
        dtype=torch.float32,
        kv_scale_L2=None,
    )


def cpu():
    """A stand-in CPU."""
    return types.SimpleNamespace(
        name="cpu", free_memory=lambda: None, torch_device=torch.device("cpu")
    )


def test_a_cpus_pool_is_bounded_by_its_free_memory(monkeypatch):
    """By the share that is allowed, and by full contexts for all running sequences."""
    monkeypatch.setattr(kv_pool, "available_memory", lambda: 2 * 2**30)
    assert num_pages_for(small(), cpu(), 16, 16, 0.5) == 2**30 // (16 * token_bytes(small()))
    assert num_pages_for(small(64), cpu(), 16, 16, 0.5) == (16 + 8) * 4 + 1
    with pytest.raises(InvalidField, match="one full context needs 257"):
        num_pages_for(small(), cpu(), 16, 16, 0.2)


def test_a_cpus_pages_take_memory_when_they_are_used():
    """A pool of 2 GiB takes next to nothing, and one page about its own size in each layer."""
    before = _resident()
    kv = allocate(small(), cpu(), 1024, 16)
    assert kv.k_LNHSE.nbytes + kv.v_LNHSE.nbytes == 2 * 2**30
    assert _resident() - before < 64 * 2**20
    kv.k_LNHSE[:, 7] = 1.0
    kv.v_LNHSE[:, 7] = 1.0
    assert _resident() - before < 128 * 2**20
    assert not kv.k_LNHSE[:, 8].any()


def _resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
