"""vision_msgs 4 for rosbags, from the text of its definitions, not from the client's."""

from __future__ import annotations

from rosbags.typesys import Stores, get_types_from_msg, get_typestore

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
