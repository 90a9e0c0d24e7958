"""Images of every kind."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from legato.v1 import media_pb2
from legato_client import CachedImage, ImageInput, RawFrame
from legato_client._images.sources import to_image
from PIL import Image


def test_bytes_and_paths(tmp_path):
    """A file's bytes travel unchanged, whether named or given."""
    path = tmp_path / "a.jpg"
    path.write_bytes(b"jpeg")
    pictures: list[ImageInput] = [b"jpeg", bytearray(b"jpeg"), path, str(path)]
    for picture in pictures:
        assert to_image(picture).encoded.data == b"jpeg"


def test_cached():
    """A cached image is its id."""
    assert to_image(CachedImage("i")).image_id == "i"


@pytest.mark.parametrize(
    ("shape", "pixel_format", "stride"),
    [
        ((2, 5), media_pb2.PIXEL_FORMAT_MONO8, 5),
        ((2, 5, 3), media_pb2.PIXEL_FORMAT_RGB8, 15),
        ((2, 5, 4), media_pb2.PIXEL_FORMAT_RGBA8, 20),
    ],
)
def test_arrays(shape, pixel_format, stride):
    """An array is sent raw with its layout."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    raw = to_image(array).raw
    assert (raw.layout.width, raw.layout.height) == (5, 2)
    assert (raw.layout.format, raw.layout.row_stride_bytes) == (pixel_format, stride)
    assert raw.data == array.tobytes()


def test_array_view():
    """A view that is not contiguous is sent in its own row order."""
    array = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)[:, ::-1]
    assert to_image(array).raw.data == array.copy().tobytes()


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 2), np.float32), np.zeros(4, np.uint8), np.zeros((2, 2, 5), np.uint8)],
)
def test_bad_arrays(array):
    """An array that is no image is refused."""
    with pytest.raises(ValueError, match="need a"):
        to_image(array)


def test_pillow_is_lossless():
    """A Pillow image arrives pixel for pixel, other modes as RGB."""
    picture = Image.effect_noise((9, 7), 50)
    assert Image.open(io.BytesIO(to_image(picture).encoded.data)).tobytes() == picture.tobytes()
    decoded = Image.open(io.BytesIO(to_image(picture.convert("CMYK")).encoded.data))
    assert decoded.mode == "RGB"


def test_pillow_is_turned_upright():
    """The EXIF orientation is applied, since a PNG's reader would not see it."""
    picture = Image.new("RGB", (9, 7))
    picture.getexif()[0x0112] = 6  # rotate by 90 degrees
    decoded = Image.open(io.BytesIO(to_image(picture).encoded.data))
    assert decoded.size == (7, 9)


def test_not_a_picture():
    """Anything else is a TypeError."""
    with pytest.raises(TypeError, match="not an image: int"):
        to_image(3)  # type: ignore[arg-type] # the very mistake


def test_import_is_light():
    """Importing the client, the command line included, loads none of the optional packages."""
    program = (
        "import sys, legato_client, legato_client.cli\n"
        "heavy = {'torch', 'PIL', 'numpy', 'rich', 'legato_engine', 'legato_service'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shape", "name", "pixel_format", "size"),
    [
        ((2, 6, 3), "bgr8", media_pb2.PIXEL_FORMAT_BGR8, (6, 2)),
        ((2, 6, 4), "bgra8", media_pb2.PIXEL_FORMAT_BGRA8, (6, 2)),
        ((3, 6), "nv12", media_pb2.PIXEL_FORMAT_NV12, (6, 2)),
        ((2, 6, 2), "yuyv", media_pb2.PIXEL_FORMAT_YUYV, (6, 2)),
    ],
)
def test_arrays_of_cameras(shape, name, pixel_format, size):
    """An array of OpenCV or of a camera is sent under its own format and true size."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    raw = to_image(RawFrame.from_array(array, name)).raw
    assert raw.layout.format == pixel_format
    assert (raw.layout.width, raw.layout.height) == size
    assert raw.data == array.tobytes()


def test_frame_with_padding():
    """A stride is kept, and the last row needs none."""
    raw = to_image(RawFrame(bytearray(8 + 6), 2, 2, "bgr8", stride=8)).raw
    assert (raw.layout.row_stride_bytes, len(raw.data)) == (8, 14)
    assert to_image(RawFrame(memoryview(bytes(12)), 2, 2, "rgb8")).raw.layout.row_stride_bytes == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"1234", 2, 2, "rgb8"), "need 12 bytes, got 4"),
        ((bytes(12), 2, 2, "rgb8", 5), "row has 6 bytes"),
        ((bytes(12), 0, 2, "rgb8"), "at least one pixel"),
        ((bytes(12), 2, 2, "rgb"), "format must be one of"),
        ((bytes(4), 2, 2, "nv12"), "need 6 bytes"),
    ],
)
def test_bad_frames(arguments, message):
    """Pixels that cannot have the shape are refused, with what is needed."""
    with pytest.raises(ValueError, match=message):
        RawFrame(*arguments)


def test_channels_of_a_format():
    """An array with other channels than its format is refused."""
    with pytest.raises(ValueError, match="bgr8 needs 3 channels"):
        RawFrame.from_array(np.zeros((2, 2), np.uint8), "bgr8")
