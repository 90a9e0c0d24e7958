"""Bytes of messages, against those of rosbags."""

from __future__ import annotations

import numpy as np
import pytest
from legato_client import Box, Detection, DetectResult, ros2
from legato_client._types.results import FrameStamp, ImageInfo, ResponseInfo
from legato_client.ros import cdr

from tests.clients.python.ros.vision import typestore

STORE = typestore()
STAMP = FrameStamp("camera_optical", 1_700_000_000_123_456_789, 1)
INFO = ResponseInfo("", "m", "stop", image=ImageInfo("", 640, 480, False), stamp=STAMP)


def array(*labels: str) -> ros2.Detection2DArray:
    """One box for each label."""
    found = tuple(
        Detection(Box(0.1 * n, 0.2, 0.3, 0.4), label, 0.5, f"{n}") for n, label in enumerate(labels)
    )
    return ros2.detections(DetectResult(found, INFO))


@pytest.mark.parametrize("labels", [(), ("cup",), ("a", "red ball", "日本")])
def test_arrays_are_those_of_rosbags(labels):
    """Read by rosbags they have every field, and rosbags writes the same bytes again."""
    expected = array(*labels)
    data = cdr.detection_array(expected)
    read = STORE.deserialize_cdr(data, cdr.DETECTIONS)
    assert (read.header.stamp.sec, read.header.stamp.nanosec) == (1_700_000_000, 123_456_789)
    assert read.header.frame_id == "camera_optical"
    for each, one in zip(read.detections, expected.detections, strict=True):
        assert each.id == one.id
        assert each.results[0].hypothesis.class_id == one.results[0].hypothesis.class_id
        assert each.results[0].pose.pose.orientation.w == 1
        assert each.bbox.center.position.x == one.bbox.center.position.x
        assert each.bbox.size_y == one.bbox.size_y
    assert STORE.serialize_cdr(read, cdr.DETECTIONS) == data


def test_compressed_images_are_those_of_rosbags():
    """As above."""
    data = cdr.compressed_image(ros2.header(STAMP), "jpeg", bytes(range(255)))
    read = STORE.deserialize_cdr(data, cdr.COMPRESSED_IMAGE)
    assert read.format == "jpeg"
    assert np.array_equal(read.data, np.arange(255, dtype=np.uint8))
    assert STORE.serialize_cdr(read, cdr.COMPRESSED_IMAGE) == data
