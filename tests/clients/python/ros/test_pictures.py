"""Images of ROS 2 as images of the client."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from legato_client._images.pillow import open_upright
from legato_client._images.sources import to_image
from legato_client.ros import images

from tests.clients.python.images.test_sources import seen

RED = (255, 0, 0)


def image(encoding: str, data: bytes, step: int, size: tuple[int, int] = (2, 2)) -> SimpleNamespace:
    width, height = size
    return SimpleNamespace(encoding=encoding, data=data, step=step, width=width, height=height)


PIXELS = {  # encoding: the bytes of two pixels in a row, and their colours
    "rgb8": (b"\xff\0\0\1\2\3", (RED, (1, 2, 3))),
    "bgr8": (b"\0\0\xff\3\2\1", (RED, (1, 2, 3))),
    "8UC3": (b"\0\0\xff\3\2\1", (RED, (1, 2, 3))),
    "rgba8": (b"\xff\0\0\x07\1\2\3\xff", (RED, (1, 2, 3))),
    "bgra8": (b"\0\0\xff\x07\3\2\1\xff", (RED, (1, 2, 3))),
    "8UC4": (b"\0\0\xff\x07\3\2\1\xff", (RED, (1, 2, 3))),
    "mono8": (b"\0\x7f", ((0, 0, 0), (127, 127, 127))),
    "8UC1": (b"\0\x7f", ((0, 0, 0), (127, 127, 127))),
    "yuv422_yuy2": (bytes((81, 90, 81, 240)), (RED, RED)),
    "yuyv": (bytes((81, 90, 81, 240)), (RED, RED)),
    "yuv422": (bytes((90, 81, 240, 81)), (RED, RED)),
    "uyvy": (bytes((90, 81, 240, 81)), (RED, RED)),
    "nv12": (b"\x51\x51", (RED, RED)),  # a row of chroma follows those of luma
}


@pytest.mark.parametrize("encoding", list(images._FORMATS))
def test_every_encoding_has_its_own_colours(encoding):
    """Drawn on here and decoded by the server, with rows that are padded."""
    row, colours = PIXELS[encoding]
    padded = row + b"\x55\x55"
    data = 2 * padded + (bytes((90, 240)) + b"\x55\x55" if encoding == "nv12" else b"")
    frame = images.raw(image(encoding, data, len(padded)))
    shown, served = np.asarray(open_upright(frame)), seen(to_image(frame))
    exact = encoding[:3] not in ("yuv", "yuy", "uyv", "nv1")
    for pixels in (shown, served):
        assert pixels.shape == (2, 2, 3)
        assert np.abs(pixels.astype(int) - colours).max() <= (0 if exact else 4)


@pytest.mark.parametrize("encoding", ["16UC1", "bayer_rggb8", "32FC1", ""])
def test_other_encodings_are_refused(encoding):
    """The message names those that are taken."""
    with pytest.raises(ValueError, match="encoding is one of rgb8, bgr8"):
        images.raw(image(encoding, bytes(64), 8))


def test_too_few_bytes_are_refused():
    """As by every raw frame."""
    with pytest.raises(ValueError, match="need 12 bytes, got 11"):
        images.raw(image("rgb8", bytes(11), 6))


def test_depth_is_no_image():
    """Its file has a header of its own."""
    assert images.compressed(SimpleNamespace(format="rgb8; jpeg compressed bgr8", data=b"x"))
    with pytest.raises(ValueError, match="depth"):
        images.compressed(SimpleNamespace(format="16UC1; compressedDepth png", data=b"x"))
