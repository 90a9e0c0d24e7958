"""Images of ROS 2 as images of the client."""

from __future__ import annotations

from typing import Protocol

from legato_client._images.raw_frame import PixelFormat, RawFrame

_FORMATS: dict[str, PixelFormat] = {
    "rgb8": "rgb8",
    "bgr8": "bgr8",
    "rgba8": "rgba8",
    "bgra8": "bgra8",
    "mono8": "mono8",
    "8UC1": "mono8",
    "8UC3": "bgr8",
    "8UC4": "bgra8",
    "nv12": "nv12",
    "yuv422_yuy2": "yuyv",
    "yuyv": "yuyv",
    "yuv422": "yuyv",  # once its bytes are swapped
    "uyvy": "yuyv",
}
_SWAPPED = ("yuv422", "uyvy")


class ImageLike(Protocol):
    """sensor_msgs/Image."""

    height: int
    width: int
    encoding: str
    step: int
    data: bytes


class CompressedImageLike(Protocol):
    """sensor_msgs/CompressedImage."""

    format: str
    data: bytes


def raw(image: ImageLike) -> RawFrame:
    """ValueError for an encoding that no server takes, or fewer bytes than pixels."""
    form = _FORMATS.get(image.encoding)
    if form is None:
        raise ValueError(f"encoding is one of {', '.join(_FORMATS)}, not {image.encoding!r}")
    data = bytes(image.data)
    if image.encoding in _SWAPPED:
        data = _with_swapped_bytes(data)
    return RawFrame(data, image.width, image.height, form, image.step)


def compressed(image: CompressedImageLike) -> bytes:
    """The file, JPEG or PNG; ValueError for depth, which is no picture."""
    if "compressedDepth" in image.format:
        raise ValueError(f"a depth image is no picture: format {image.format!r}")
    return bytes(image.data)


def _with_swapped_bytes(data: bytes) -> bytes:
    """UYVY as YUYV."""
    swapped = bytearray(data)
    even = len(data) // 2 * 2
    swapped[0:even:2], swapped[1:even:2] = data[1:even:2], data[0:even:2]
    return bytes(swapped)
