"""Batch sizes of decode steps, and the size of the KV pool."""

from __future__ import annotations

import types

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.runtime.kv_pool import decode_buckets, num_pages_for, token_bytes


def device(kind):
    """A stand-in device with what sizes depend on."""
    return types.SimpleNamespace(torch_device=torch.device(kind))


@pytest.mark.parametrize(
    ("kind", "most", "sizes"),
    [
        ("cpu", 6, (6,)),
        ("cpu", 48, (8, 16, 32, 48)),
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
