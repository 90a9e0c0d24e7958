"""Pixels in a slab, freed with their last view."""

import concurrent.futures
import random
from typing import Any

import numpy as np
import pytest
from legato_engine.images.memory import PAGE, PixelMemory, host_slab

SHAPE = (200, 300, 3)
SIZE = 200 * 300 * 3


def address(pixels_HWC):
    """Return where the pixels begin."""
    return pixels_HWC.__array_interface__["data"][0]


def test_memory_is_used_again():
    """The next array that fits takes the freed extent."""
    memory = PixelMemory(host_slab(1 << 20))
    first = memory.allocate(SHAPE)
    where = address(first)
    del first
    again = memory.allocate((100, 301, 3))
    assert address(again) == where
    assert (again.shape, again.dtype.name) == ((100, 301, 3), "uint8")
    again[:] = 7  # it may be written


@pytest.mark.parametrize(
    "view",
    [
        lambda pixels: pixels[5:, ::2],
        lambda pixels: pixels.reshape(-1)[10:20],
        lambda pixels: np.frombuffer(memoryview(pixels.reshape(-1)), np.uint8),
    ],
)
def test_a_view_holds_its_memory(view):
    """An extent is not reused while a view of it exists."""
    memory = PixelMemory(host_slab(1 << 20))
    pixels = memory.allocate(SHAPE)
    pixels[:] = 1
    seen = view(pixels)
    del pixels
    other = memory.allocate(SHAPE)
    other[:] = 2
    assert (seen == 1).all()


def test_a_full_slab_falls_back_to_other_memory():
    """Without a free extent other memory is used; at the end all of the slab is free."""
    memory = PixelMemory(host_slab(2 * SIZE))
    images = [memory.allocate(SHAPE) for _ in range(4)]
    for value, pixels in enumerate(images):
        pixels[:] = value
    assert all((pixels == value).all() for value, pixels in enumerate(images))
    large = memory.allocate((2000, 1000, 3))
    assert large.shape == (2000, 1000, 3)
    del images, pixels, large
    assert memory.free_bytes == 2 * SIZE


def test_free_extents_are_merged():
    """After arrays of many sizes in any order, one of almost the whole slab fits."""
    rng, slab = random.Random(0), host_slab(4 << 20)
    memory = PixelMemory(slab)
    held: list[tuple[int, Any]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            value, pixels = held.pop(rng.randrange(len(held)))
            assert (pixels == value).all()
            del pixels
        else:
            pixels = memory.allocate((rng.randint(1, 300), rng.randint(1, 300), 3))
            value = rng.randrange(256)
            pixels[:] = value
            held.append((value, pixels))
    del held, pixels
    whole = memory.allocate((1, (slab.size - PAGE) // 3, 3))
    assert address(whole) == address(slab)


def test_threads_never_get_the_same_memory():
    """Four threads read back what they wrote."""
    memory = PixelMemory(host_slab(3 * SIZE))

    def use(value):
        for _ in range(200):
            pixels = memory.allocate(SHAPE)
            pixels[:] = value
            if not (pixels == value).all():
                return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
