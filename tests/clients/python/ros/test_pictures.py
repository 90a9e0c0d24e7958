"""Images of ROS 2 as images of the client."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from legato_client._images.pillow import open_upright
from legato_client.ros import pictures
from PIL import Image

RED = (255, 0, 0)


def pixel_of(shown: Image.Image, x: int, y: int) -> tuple[int, int, int]:
    pixel = shown.getpixel((x, y))
    assert isinstance(pixel, tuple)
    red, green, blue = pixel
    return red, green, blue


def image(encoding: str, data: bytes, step: int, size: tuple[int, int] = (2, 2)) -> SimpleNamespace:
    width, height = size
    return SimpleNamespace(encoding=encoding, data=data, step=step, width=width, height=height)


@pytest.mark.parametrize(
    ("encoding", "pixel"),
    [
        ("rgb8", b"\xff\0\0"),
        ("bgr8", b"\0\0\xff"),
        ("8UC3", b"\0\0\xff"),
        ("rgba8", b"\xff\0\0\x07"),
        ("bgra8", b"\0\0\xff\x07"),
    ],
)
def test_colours_are_read_in_the_order_of_the_encoding(encoding, pixel):
    """With rows that are padded."""
    row = 2 * pixel + b"\x55"
    shown = open_upright(pictures.raw(image(encoding, 2 * row, len(row))))
    assert [pixel_of(shown, x, y) for x in (0, 1) for y in (0, 1)] == 4 * [RED]


def test_grey_is_read():
    """One byte a pixel."""
    shown = open_upright(pictures.raw(image("mono8", bytes((0, 255, 255, 0)), 2)))
    assert [pixel_of(shown, x, 0)[0] for x in (0, 1)] == [0, 255]


def test_both_orders_of_yuv422_are_one_picture():
    """yuv422 is UYVY in ROS, yuv422_yuy2 is YUYV."""
    yuyv = bytes((81, 90, 81, 240)) * 2
    uyvy = bytes((90, 81, 240, 81)) * 2
    one = open_upright(pictures.raw(image("yuv422_yuy2", yuyv, 4)))
    other = open_upright(pictures.raw(image("yuv422", uyvy, 4)))
    assert one.tobytes() == other.tobytes()
    red, green, blue = pixel_of(one, 0, 0)
    assert red > 240
    assert max(green, blue) < 20


def test_nv12_is_read():
    """Its rows of colour follow those of brightness."""
    shown = open_upright(pictures.raw(image("nv12", bytes((81,) * 4) + bytes((90, 240)), 2)))
    assert pixel_of(shown, 1, 1)[0] > 240


@pytest.mark.parametrize("encoding", ["16UC1", "bayer_rggb8", "32FC1", ""])
def test_other_encodings_are_refused(encoding):
    """The message names those that are taken."""
    with pytest.raises(ValueError, match="encoding is one of rgb8, bgr8"):
        pictures.raw(image(encoding, bytes(64), 8))


def test_too_few_bytes_are_refused():
    """As by every raw frame."""
    with pytest.raises(ValueError, match="need 12 bytes, got 11"):
        pictures.raw(image("rgb8", bytes(11), 6))


def test_depth_is_no_picture():
    """Its file has a header of its own."""
    assert pictures.compressed(SimpleNamespace(format="rgb8; jpeg compressed bgr8", data=b"x"))
    with pytest.raises(ValueError, match="depth"):
        pictures.compressed(SimpleNamespace(format="16UC1; compressedDepth png", data=b"x"))
