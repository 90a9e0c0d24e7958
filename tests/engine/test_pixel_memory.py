"""Pixels live in blocks that come back when nobody looks at them any more."""

import concurrent.futures

import numpy as np
import pytest
from legato_engine.pixel_memory import SMALLEST, PixelMemory, block_size

SHAPE = (200, 300, 3)


def address(pixels_HWC):
    """Where the pixels begin."""
    return pixels_HWC.__array_interface__["data"][0]


def test_a_block_is_used_again():
    """A picture of about the same size finds the block that one before has left."""
    memory = PixelMemory()
    first = memory.take(SHAPE)
    where = address(first)
    del first
    again = memory.take((199, 301, 3))  # of the same size class
    assert address(again) == where
    assert again.shape == (199, 301, 3)
    again[:] = 7  # it may be written


@pytest.mark.parametrize(
    "view",
    [
        lambda pixels: pixels[5:, ::2],
        lambda pixels: pixels.reshape(-1)[10:20],
        lambda pixels: np.frombuffer(memoryview(pixels.reshape(-1)), np.uint8),
    ],
)
def test_a_view_holds_its_block(view):
    """As long as anybody can see the pixels, nobody else gets their memory."""
    memory = PixelMemory()
    pixels = memory.take(SHAPE)
    pixels[:] = 1
    seen = view(pixels)
    del pixels
    other = memory.take(SHAPE)
    other[:] = 2
    assert (seen == 1).all()


def test_two_pictures_share_nothing():
    """Two at a time are in two blocks."""
    memory = PixelMemory()
    memory.make_ready(SHAPE)
    left, right = memory.take(SHAPE), memory.take(SHAPE)
    left[:], right[:] = 1, 2
    assert (left == 1).all()


def test_what_was_made_ready_is_found():
    """The next picture of that size gets it, and one is enough."""
    memory = PixelMemory()
    memory.make_ready(SHAPE)
    block = memory._returned[0]
    pixels = memory.take(SHAPE)
    assert np.shares_memory(pixels, np.frombuffer(block, np.uint8))
    memory.make_ready(SHAPE)
    memory.make_ready(SHAPE)
    assert len(memory._free) + len(memory._returned) == 1


def test_spare_blocks_are_few():
    """After a burst, only so many bytes stay."""
    memory = PixelMemory(spare_bytes=3 * block_size(200 * 300 * 3))
    pictures = [memory.take(SHAPE) for _ in range(8)]
    pictures.clear()
    memory.take((10, 10, 3))
    assert sum(map(len, memory._free)) <= 3 * block_size(200 * 300 * 3)


@pytest.mark.parametrize("num_bytes", [1, SMALLEST, SMALLEST + 1, 1_530_000, 36_000_000, 2**24])
def test_a_block_is_a_little_larger_than_its_picture(num_bytes):
    """By a quarter at most."""
    size = block_size(num_bytes)
    assert num_bytes <= size <= max(SMALLEST, num_bytes * 5 // 4)


def test_threads_never_get_the_same_block():
    """Four threads write and read back what they wrote."""
    memory = PixelMemory()

    def use(value):
        for _ in range(200):
            pixels = memory.take(SHAPE)
            pixels[:] = value
            if not (pixels == value).all():
                return False
            memory.make_ready(SHAPE)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
