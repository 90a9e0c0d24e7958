"""Patches, stitching and pooling against loops."""

from __future__ import annotations

import pytest
import torch
from legato_engine.models.moondream.vision import patches, stitch

from tests.engine.models.reference_moondream import pooled


def test_patch_values_run_by_channel_row_column():
    """Value c * 196 + y * 14 + x of patch (gy, gx) is the pixel it covers."""
    pixels_NHWC = torch.randn(2, 28, 42, 3)
    out_NTP = patches(pixels_NHWC, 14)
    assert out_NTP.shape == (2, 6, 588)
    for gy, gx, c, y, x in [(0, 0, 0, 0, 0), (1, 2, 2, 13, 5), (0, 1, 1, 3, 12), (1, 0, 0, 7, 0)]:
        value = pixels_NHWC[1, gy * 14 + y, gx * 14 + x, c]
        assert out_NTP[1, gy * 3 + gx, c * 196 + y * 14 + x] == value


@pytest.mark.parametrize("tiling", [(1, 2), (2, 1), (2, 3), (3, 4)])
def test_stitching_drops_inner_margins(tiling):
    """Every cell of the grid comes from the one tile that owns it."""
    rows, columns = tiling
    grid, margin = 9, 2
    core = grid - 2 * margin
    tiles_NGGD = torch.randn(rows * columns, grid, grid, 2)
    out_YWD = stitch(tiles_NGGD, tiling, margin)
    assert out_YWD.shape == (rows * core + 2 * margin, columns * core + 2 * margin, 2)
    for y in range(out_YWD.shape[0]):
        for x in range(out_YWD.shape[1]):
            i = min(max((y - margin) // core, 0), rows - 1)
            j = min(max((x - margin) // core, 0), columns - 1)
            expected = tiles_NGGD[i * columns + j, y - i * core, x - j * core]
            assert torch.equal(out_YWD[y, x], expected)


@pytest.mark.parametrize("tiling", [(2, 2), (1, 4), (3, 1)])
def test_reconstruction_pools_the_stitched_grid(tiny_model, tiny_config, tiling):
    """Pooling windows go from floor to ceiling."""
    vision = tiny_model._network.vision
    grid, dim = tiny_config.vision.grid, tiny_config.vision.dim
    tiles_NTD = torch.randn(tiling[0] * tiling[1], grid * grid, dim)
    out_TD = vision.reconstruct(tiles_NTD, tiling)
    stitched = stitch(tiles_NTD.reshape(-1, grid, grid, dim), tiling, 1)
    expected_TD = pooled(stitched, grid).reshape(grid * grid, dim)
    torch.testing.assert_close(out_TD, expected_TD)


def test_crops_never_mix(tiny_model):
    """A crop's features do not depend on other crops."""
    pixels = torch.randint(0, 256, (3, 56, 56, 3), dtype=torch.uint8)
    together = tiny_model._network.vision.encode(pixels)
    torch.testing.assert_close(together[1:2], tiny_model._network.vision.encode(pixels[1:2]))


def test_a_second_encoder_leaves_the_tile_counters_of_the_first(tiny_model):
    """The graphs that it captured clear and count in that memory."""
    network = tiny_model._network
    for part in (network.vision, network.text):
        part.count_apart()
        first = part._counters
        part.count_apart()
        assert part._counters is first
        part._counters = None  # of a GPU's kernels alone
