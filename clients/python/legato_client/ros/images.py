"""ROS 2 images to client images, and results to arrays."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from legato_client import ros2
from legato_client._errors import LegatoError
from legato_client._images.sources import ImageInput, PixelFormat, RawFrame
from legato_client._types import results
from legato_client.stream.feed import AnsweredFrame
from legato_client.stream.frames import CapturedFrame

if TYPE_CHECKING:
    from PIL import Image as PillowImage

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


def raw(image: Any) -> RawFrame:
    """Convert a sensor_msgs/Image.

    Raises ValueError for an unknown encoding, or too few bytes.
    """
    form = _FORMATS.get(image.encoding)
    if form is None:
        raise ValueError(f"encoding is one of {', '.join(_FORMATS)}, not {image.encoding!r}")
    data = bytes(image.data)
    if image.encoding in _SWAPPED:
        data = _with_swapped_bytes(data)
    return RawFrame(data, image.width, image.height, form, image.step)


def compressed(image: Any) -> bytes:
    """Return the JPEG or PNG file of a sensor_msgs/CompressedImage.

    Raises ValueError for depth images.
    """
    if "compressedDepth" in image.format:
        raise ValueError(f"a depth image is no image: format {image.format!r}")
    return bytes(image.data)


def _with_swapped_bytes(data: bytes) -> bytes:
    """Convert UYVY to YUYV."""
    swapped = bytearray(data)
    even = len(data) // 2 * 2
    swapped[0:even:2], swapped[1:even:2] = data[1:even:2], data[0:even:2]
    return bytes(swapped)


def captured(sample: Any, number: int, *, by_arrival: bool) -> CapturedFrame:
    """Convert a sensor_msgs/Image or CompressedImage whose `origin` becomes its header.

    `by_arrival`: its age counts from now, not from its stamp, as with simulated time.
    """
    stamp, arrived_ns = ros2.frame_stamp(sample.header, 0), time.time_ns()
    captured_ns = None if by_arrival else stamp.capture_time_ns
    return CapturedFrame(
        number,
        0.0,
        captured_ns or arrived_ns,
        functools.partial(read, sample),
        functools.partial(_opened, sample),
        stamp.frame_id,
        sample.header,
    )


def read(sample: Any) -> ImageInput:
    return raw(sample) if hasattr(sample, "encoding") else compressed(sample)


def _opened(sample: Any) -> PillowImage.Image:
    from legato_client._images.pillow import open_upright

    return open_upright(read(sample))


# ---------------------------------------------------------------- arrays


def of(
    outcomes: Sequence[results.Result | LegatoError],
    header: ros2.HeaderLike,
    size: tuple[int, int],
    absent_score: float,
) -> ros2.Detection2DArray:
    """Convert results to one array; outlines become boxes, points boxes without a size.

    `size` is the image's in pixels. A task that failed has nothing, nor has an answer in words.
    """
    own = ros2.Header(ros2.Time(header.stamp.sec, header.stamp.nanosec), header.frame_id)
    stamp = ros2.frame_stamp(own, 0)
    found: list[ros2.Detection2D] = []
    for each in outcomes:
        outcome = each
        if isinstance(outcome, results.SegmentResult):
            boxes = [results.Detection(e.box, e.label, e.confidence) for e in outcome.segments]
            outcome = results.DetectResult(tuple(boxes), outcome.info)
        if isinstance(outcome, results.DetectResult | results.PointResult):
            array = ros2.detections(outcome, stamp=stamp, size=size, absent_score=absent_score)
            found += array.detections
    return ros2.Detection2DArray(own, tuple(found))


def predicted(
    latest: AnsweredFrame, now_ns: int, tracks: Sequence[results.TrackNow], absent_score: float
) -> ros2.Detection2DArray:
    """Build the array of tracked objects where they are at `now_ns` since the epoch.

    `latest` is the frame answered last, of `captured` and with the size of its image. The stamp is
    of the images' clock: as much after the frame's as the present is after its capture.
    """
    header: Any = latest.frame.origin
    assert latest.image is not None, "a frame without a size has no array"
    stamp_ns = ros2.frame_stamp(header, 0).capture_time_ns or 0
    stamp = ros2.Time(*divmod(stamp_ns + now_ns - latest.frame.captured_ns, 10**9))
    found = results.DetectResult(
        tuple(dataclasses.replace(each.last, box=each.box) for each in tracks),
        results.ResponseInfo("", "", "", image=latest.image),
    )
    size = latest.image.width, latest.image.height
    return of((found,), ros2.Header(stamp, header.frame_id), size, absent_score)
