"""Definitions of the messages that are written into bags, as bags carry them."""

from __future__ import annotations

_PARTS = {
    "std_msgs/Header": "builtin_interfaces/Time stamp\nstring frame_id\n",
    "builtin_interfaces/Time": "int32 sec\nuint32 nanosec\n",
    "geometry_msgs/Point": "float64 x\nfloat64 y\nfloat64 z\n",
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
    "sensor_msgs/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data\n",
}
_LINE = "=" * 80

DETECTIONS = "vision_msgs/msg/Detection2DArray"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
IMAGE = "sensor_msgs/msg/Image"


def text_of(name: str) -> str:
    """The definition of a message, followed by those of all that it is made of."""
    own = name.replace("/msg/", "/")
    parts = [f"MSG: {part}\n{_PARTS[part]}" for part in _needed(own) if part != own]
    return f"{_LINE}\n".join((_PARTS[own], *parts))


def _needed(name: str) -> list[str]:
    found = [name]
    for line in _PARTS[name].splitlines():
        part = line.split()[0].partition("[")[0]
        if part in _PARTS:
            found += [each for each in _needed(part) if each not in found]
    return found
