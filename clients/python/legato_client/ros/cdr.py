"""Messages of ROS 2 as bytes: CDR, little-endian, with its header of four bytes."""

from __future__ import annotations

import struct

from legato_client import ros2

_HEADER = b"\x00\x01\x00\x00"  # plain CDR, little-endian


class Writer:
    """Appends values; a number lies at a multiple of its size, counted after the header."""

    def __init__(self) -> None:
        self._data = bytearray()

    def written(self) -> bytes:
        return _HEADER + bytes(self._data)

    def uint32(self, value: int) -> None:
        self._pack("<I", 4, value)

    def int32(self, value: int) -> None:
        self._pack("<i", 4, value)

    def float64(self, *values: float) -> None:
        for value in values:
            self._pack("<d", 8, value)

    def string(self, text: str) -> None:
        data = text.encode() + b"\0"
        self.uint32(len(data))
        self._data += data

    def octets(self, data: bytes) -> None:
        """A sequence of uint8."""
        self.uint32(len(data))
        self._data += data

    def _pack(self, form: str, size: int, value: float) -> None:
        self._data += bytes(-len(self._data) % size)
        self._data += struct.pack(form, value)


def detection_array(array: ros2.Detection2DArray) -> bytes:
    """A vision_msgs/Detection2DArray."""
    writer = Writer()
    _header(writer, array.header)
    writer.uint32(len(array.detections))
    for each in array.detections:
        _detection(writer, each)
    return writer.written()


def compressed_image(header: ros2.Header, form: str, data: bytes) -> bytes:
    """A sensor_msgs/CompressedImage."""
    writer = Writer()
    _header(writer, header)
    writer.string(form)
    writer.octets(data)
    return writer.written()


def _header(writer: Writer, header: ros2.Header) -> None:
    writer.int32(header.stamp.sec)
    writer.uint32(header.stamp.nanosec)
    writer.string(header.frame_id)


def _detection(writer: Writer, detection: ros2.Detection2D) -> None:
    _header(writer, detection.header)
    writer.uint32(len(detection.results))
    for each in detection.results:
        writer.string(each.hypothesis.class_id)
        writer.float64(each.hypothesis.score)
        position, turn = each.pose.pose.position, each.pose.pose.orientation
        writer.float64(position.x, position.y, position.z, turn.x, turn.y, turn.z, turn.w)
        writer.float64(*each.pose.covariance)
    center, box = detection.bbox.center, detection.bbox
    writer.float64(center.position.x, center.position.y, center.theta, box.size_x, box.size_y)
    writer.string(detection.id)
