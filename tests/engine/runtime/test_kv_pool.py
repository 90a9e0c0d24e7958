"""How large steps are: the batch sizes that exist."""

from __future__ import annotations

import types

import pytest
import torch
from legato_engine.runtime.kv_pool import decode_buckets


def device(kind):
    """As much of a device as matters here."""
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
    """A GPU has all that a prompt may need, and one for a question between the last two."""
    assert decode_buckets(device(kind), most) == sizes
