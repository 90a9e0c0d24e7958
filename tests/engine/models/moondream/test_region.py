"""Coordinates and sizes."""

import torch
from legato_engine.models.moondream.region import sizes_of

NUM_BINS = 1024


def test_a_size_does_not_depend_on_the_batch():
    """Every bin has the same size alone and at any place among others, bit for bit."""
    bin_T2 = torch.arange(NUM_BINS).reshape(-1, 2)
    together_T2 = sizes_of(bin_T2, NUM_BINS)
    for start in (0, 1, 3):
        assert torch.equal(sizes_of(bin_T2[start:], NUM_BINS), together_T2[start:])
    for bin_2, size_2 in zip(bin_T2, together_T2, strict=True):
        assert torch.equal(sizes_of(bin_2[None], NUM_BINS)[0], size_2)
    assert together_T2[0, 0] == 2.0**-10
    assert together_T2[-1, 1] == 1.0
