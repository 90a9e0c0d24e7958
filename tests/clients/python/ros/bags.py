"""Bags that rosbags writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

# ---------------------------------------------------------------- vision
# vision_msgs 4 for rosbags, from the text of its definitions, not from the client's.

_DEFINITIONS = {
    "Point2D": "float64 x\nfloat64 y",
    "Pose2D": "vision_msgs/Point2D position\nfloat64 theta",
    "BoundingBox2D": "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y",
    "ObjectHypothesis": "string class_id\nfloat64 score",
    "ObjectHypothesisWithPose": (
        "ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose"
    ),
    "Detection2D": (
        "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox2D bbox\nstring id"
    ),
    "Detection2DArray": "std_msgs/Header header\nDetection2D[] detections",
    "BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size",
    "Detection3D": (
        "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox3D bbox\nstring id"
    ),
    "Detection3DArray": "std_msgs/Header header\nDetection3D[] detections",
    "VisionInfo": (
        "std_msgs/Header header\nstring method\nstring database_location\nint32 database_version"
    ),
}


def typestore():
    """All messages of Humble that rosbags knows, and vision_msgs."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    for name, text in _DEFINITIONS.items():
        store.register(get_types_from_msg(text, f"vision_msgs/msg/{name}"))
    return store


# ---------------------------------------------------------------- bags

STORE = typestore()
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
STRING = "std_msgs/msg/String"


def header(stamp_ns: int, frame_id: str = "camera") -> Any:
    types = STORE.types
    sec, nanosec = divmod(stamp_ns, 10**9)
    time = types["builtin_interfaces/msg/Time"](sec=sec, nanosec=nanosec)
    return types["std_msgs/msg/Header"](stamp=time, frame_id=frame_id)


def image(stamp_ns: int, image: Any, encoding: str = "rgb8") -> Any:
    """Of a Pillow image."""
    data = np.frombuffer(image.tobytes(), np.uint8)
    return STORE.types[IMAGE](
        header(stamp_ns), image.height, image.width, encoding, 0, 3 * image.width, data
    )


def compressed(stamp_ns: int, file: bytes) -> Any:
    data = np.frombuffer(file, np.uint8)
    return STORE.types[COMPRESSED](header=header(stamp_ns), format="png", data=data)


def string(text: str) -> Any:
    return STORE.types[STRING](data=text)


def write(folder: Path, messages: list[tuple[str, int, Any]]) -> Path:
    """A bag of (topic, time in ns, message); the path of its file."""
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections: dict[str, Any] = {}
        for topic, time, message in messages:
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=STORE)
            writer.write(connections[topic], time, STORE.serialize_cdr(message, kind))
    (path,) = folder.glob("*.mcap")
    return path


def read(path: Path) -> list[tuple[str, int, Any]]:
    """As `write` takes them, by the definitions that the bag carries."""
    with AnyReader([path]) as reader:
        return [
            (connection.topic, time, reader.deserialize(data, connection.msgtype))
            for connection, time, data in reader.messages()
        ]
