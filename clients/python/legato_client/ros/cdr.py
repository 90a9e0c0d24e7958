"""ROS 2 messages as CDR bytes, with their definitions."""

from __future__ import annotations

import struct
from typing import Any

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

_HEADER = b"\x00\x01\x00\x00"  # plain CDR, little-endian
_NUMBERS = {"int32": "<i", "uint32": "<I", "float64": "<d"}


def encode(name: str, message: Any) -> bytes:
    """Encode a message, whose fields are attributes, by its definition."""
    data = bytearray()
    _append(data, name.replace("/msg/", "/"), message)
    return _HEADER + bytes(data)


def _append(data: bytearray, kind: str, value: Any) -> None:
    """Append a value; a number lies at a multiple of its size, counted after the header."""
    element, is_array, length = kind.removesuffix("]").partition("[")
    if is_array:
        if not length:
            _append(data, "uint32", len(value))
        if element == "uint8":
            data += value
            return
        for each in value:
            _append(data, element, each)
    elif kind in _NUMBERS:
        data += bytes(-len(data) % struct.calcsize(_NUMBERS[kind]))
        data += struct.pack(_NUMBERS[kind], value)
    elif kind == "string":
        _append(data, "uint8[]", value.encode() + b"\0")
    else:
        for line in DEFINITIONS[kind].splitlines():
            part, name, *_ = line.split()
            _append(data, part, getattr(value, name))
