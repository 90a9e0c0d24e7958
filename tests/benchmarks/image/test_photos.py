"""The images of the benchmarks."""

from __future__ import annotations

import io

import numpy as np
from legato_engine.images.decoding import content_key, decode_encoded
from PIL import Image

from benchmarks.image.files import Photographer, stamped

SIZE = (160, 120)


def test_images_are_reproducible_and_different() -> None:
    """Seed and index identify an image; another index is another one."""
    first, again = Photographer(3, 160), Photographer(3, 160)
    assert first.jpeg(5, SIZE) == again.jpeg(5, SIZE)
    assert first.jpeg(5, SIZE) != first.jpeg(6, SIZE)
    assert Photographer(4, 160).jpeg(5, SIZE) != first.jpeg(5, SIZE)


def test_images_have_the_size_asked_for() -> None:
    """An image has the requested size, in colour."""
    image = Image.open(io.BytesIO(Photographer(0, 160).jpeg(0, SIZE)))
    assert (image.size, image.mode) == (SIZE, "RGB")


def test_neighbouring_pixels_are_alike() -> None:
    """An image compresses like a photograph: its neighbours correlate, unlike noise."""
    grey_HW = Photographer(0, 160).pixels(0, SIZE).mean(axis=2)
    correlation = np.corrcoef(grey_HW[:, :-1].ravel(), grey_HW[:, 1:].ravel())[0, 1]
    assert correlation > 0.8
    assert grey_HW.std() > 10


def test_a_stamp_changes_the_key_and_no_pixel() -> None:
    """A stamped image is another one to a cache and has the same pixels."""
    jpeg = Photographer(0, 160).jpeg(0, SIZE)
    stamps = [stamped(jpeg, serial) for serial in (0, 1, 2**63)]
    assert len({content_key(data) for data in (jpeg, *stamps)}) == 4
    for data in stamps:
        shown_HWC = decode_encoded(data, max_pixels=10**6)
        assert np.array_equal(shown_HWC, decode_encoded(jpeg, max_pixels=10**6))
