"""ROS 2 messages as CDR bytes, with their definitions."""

from __future__ import annotations

import struct

from legato_client import ros2

DEFINITIONS = {  # parts before the whole
    "builtin_interfaces/Time": "int32 sec\nuint32 nanosec\n",
    "std_msgs/Header": "builtin_interfaces/Time stamp\nstring frame_id\n",
    "geometry_msgs/Point": "float64 x\nfloat64 y\nfloat64 z\n",
    "geometry_msgs/PointStamped": "std_msgs/Header header\ngeometry_msgs/Point point\n",
    "geometry_msgs/Vector3": "float64 x\nfloat64 y\nfloat64 z\n",
    "geometry_msgs/Quaternion": "float64 x 0\nfloat64 y 0\nfloat64 z 0\nfloat64 w 1\n",
    "geometry_msgs/Pose": "geometry_msgs/Point position\ngeometry_msgs/Quaternion orientation\n",
    "geometry_msgs/PoseWithCovariance": "geometry_msgs/Pose pose\nfloat64[36] covariance\n",
    "vision_msgs/Point2D": "float64 x\nfloat64 y\n",
    "vision_msgs/Pose2D": "vision_msgs/Point2D position\nfloat64 theta\n",
    "vision_msgs/BoundingBox2D": "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "vision_msgs/ObjectHypothesis": "string class_id\nfloat64 score\n",
    "vision_msgs/ObjectHypothesisWithPose": (
        "vision_msgs/ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose\n"
    ),
    "vision_msgs/Detection2D": (
        "std_msgs/Header header\nvision_msgs/ObjectHypothesisWithPose[] results\n"
        "vision_msgs/BoundingBox2D bbox\nstring id\n"
    ),
    "vision_msgs/Detection2DArray": (
        "std_msgs/Header header\nvision_msgs/Detection2D[] detections\n"
    ),
    "vision_msgs/BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size\n",
    "vision_msgs/Detection3D": (
        "std_msgs/Header header\nvision_msgs/ObjectHypothesisWithPose[] results\n"
        "vision_msgs/BoundingBox3D bbox\nstring id\n"
    ),
    "vision_msgs/Detection3DArray": (
        "std_msgs/Header header\nvision_msgs/Detection3D[] detections\n"
    ),
    "sensor_msgs/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data\n",
}
_LINE = "=" * 80

DETECTIONS = "vision_msgs/msg/Detection2DArray"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
IMAGE = "sensor_msgs/msg/Image"


def text_of(name: str) -> str:
    """Return a message's definition, followed by those of all its parts."""
    own = name.replace("/msg/", "/")
    parts = [f"MSG: {part}\n{DEFINITIONS[part]}" for part in _needed(own) if part != own]
    return f"{_LINE}\n".join((DEFINITIONS[own], *parts))


def _needed(name: str) -> list[str]:
    found = [name]
    for line in DEFINITIONS[name].splitlines():
        part = line.split()[0].partition("[")[0]
        if part in DEFINITIONS:
            found += [each for each in _needed(part) if each not in found]
    return found


# ---------------------------------------------------------------- cdr

# ROS 2 messages as CDR bytes, little-endian, with a four-byte header.

_HEADER = b"\x00\x01\x00\x00"  # plain CDR, little-endian


class CdrWriter:
    """CDR encoder; a number lies at a multiple of its size, counted after the header."""

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
        """Append a sequence of uint8."""
        self.uint32(len(data))
        self._data += data

    def _pack(self, form: str, size: int, value: float) -> None:
        self._data += bytes(-len(self._data) % size)
        self._data += struct.pack(form, value)


def detection_array(array: ros2.Detection2DArray) -> bytes:
    """Encode a vision_msgs/Detection2DArray."""
    writer = CdrWriter()
    _header(writer, array.header)
    writer.uint32(len(array.detections))
    for each in array.detections:
        _detection(writer, each)
    return writer.written()


def compressed_image(header: ros2.Header, form: str, data: bytes) -> bytes:
    """Encode a sensor_msgs/CompressedImage."""
    writer = CdrWriter()
    _header(writer, header)
    writer.string(form)
    writer.octets(data)
    return writer.written()


def _header(writer: CdrWriter, header: ros2.Header) -> None:
    writer.int32(header.stamp.sec)
    writer.uint32(header.stamp.nanosec)
    writer.string(header.frame_id)


def _detection(writer: CdrWriter, detection: ros2.Detection2D) -> None:
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
