"""Messages of ROS 2 as types of Cyclone DDS. Needs cyclonedds (the extra `dds`).

The order of fields and the names of types are those of the messages' definitions; Humble and later,
vision_msgs 4. A field without a value has the definition's default.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float64, int32, uint8, uint32

if TYPE_CHECKING:  # for type checkers
    from builtins import list as sequence

    Octets = bytes
    Covariance = list[float]
else:
    from cyclonedds.idl.types import sequence

    Octets = sequence[uint8]
    Covariance = array[float64, 36]


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    """builtin_interfaces/Time."""

    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    """std_msgs/Header."""

    stamp: Time = field(default_factory=Time)
    frame_id: str = ""


@dataclass
class Point(IdlStruct, typename="geometry_msgs::msg::dds_::Point_"):
    """geometry_msgs/Point."""

    x: float64 = 0.0
    y: float64 = 0.0
    z: float64 = 0.0


@dataclass
class Quaternion(IdlStruct, typename="geometry_msgs::msg::dds_::Quaternion_"):
    """geometry_msgs/Quaternion."""

    x: float64 = 0.0
    y: float64 = 0.0
    z: float64 = 0.0
    w: float64 = 1.0


@dataclass
class Pose(IdlStruct, typename="geometry_msgs::msg::dds_::Pose_"):
    """geometry_msgs/Pose."""

    position: Point = field(default_factory=Point)
    orientation: Quaternion = field(default_factory=Quaternion)


@dataclass
class PoseWithCovariance(IdlStruct, typename="geometry_msgs::msg::dds_::PoseWithCovariance_"):
    """geometry_msgs/PoseWithCovariance."""

    pose: Pose = field(default_factory=Pose)
    covariance: Covariance = field(default_factory=lambda: [0.0] * 36)


@dataclass
class Point2D(IdlStruct, typename="vision_msgs::msg::dds_::Point2D_"):
    """vision_msgs/Point2D."""

    x: float64 = 0.0
    y: float64 = 0.0


@dataclass
class Pose2D(IdlStruct, typename="vision_msgs::msg::dds_::Pose2D_"):
    """vision_msgs/Pose2D."""

    position: Point2D = field(default_factory=Point2D)
    theta: float64 = 0.0


@dataclass
class BoundingBox2D(IdlStruct, typename="vision_msgs::msg::dds_::BoundingBox2D_"):
    """vision_msgs/BoundingBox2D."""

    center: Pose2D = field(default_factory=Pose2D)
    size_x: float64 = 0.0
    size_y: float64 = 0.0


@dataclass
class ObjectHypothesis(IdlStruct, typename="vision_msgs::msg::dds_::ObjectHypothesis_"):
    """vision_msgs/ObjectHypothesis."""

    class_id: str = ""
    score: float64 = 0.0


@dataclass
class ObjectHypothesisWithPose(
    IdlStruct, typename="vision_msgs::msg::dds_::ObjectHypothesisWithPose_"
):
    """vision_msgs/ObjectHypothesisWithPose."""

    hypothesis: ObjectHypothesis = field(default_factory=ObjectHypothesis)
    pose: PoseWithCovariance = field(default_factory=PoseWithCovariance)


@dataclass
class Detection2D(IdlStruct, typename="vision_msgs::msg::dds_::Detection2D_"):
    """vision_msgs/Detection2D."""

    header: Header = field(default_factory=Header)
    results: sequence[ObjectHypothesisWithPose] = field(default_factory=list)
    bbox: BoundingBox2D = field(default_factory=BoundingBox2D)
    id: str = ""


@dataclass
class Detection2DArray(IdlStruct, typename="vision_msgs::msg::dds_::Detection2DArray_"):
    """vision_msgs/Detection2DArray."""

    header: Header = field(default_factory=Header)
    detections: sequence[Detection2D] = field(default_factory=list)


@dataclass
class VisionInfo(IdlStruct, typename="vision_msgs::msg::dds_::VisionInfo_"):
    """vision_msgs/VisionInfo."""

    header: Header = field(default_factory=Header)
    method: str = ""
    database_location: str = ""
    database_version: int32 = 0


@dataclass
class KeyValue(IdlStruct, typename="diagnostic_msgs::msg::dds_::KeyValue_"):
    """diagnostic_msgs/KeyValue."""

    key: str = ""
    value: str = ""


@dataclass
class DiagnosticStatus(IdlStruct, typename="diagnostic_msgs::msg::dds_::DiagnosticStatus_"):
    """diagnostic_msgs/DiagnosticStatus."""

    level: uint8 = 0
    name: str = ""
    message: str = ""
    hardware_id: str = ""
    values: sequence[KeyValue] = field(default_factory=list)


@dataclass
class DiagnosticArray(IdlStruct, typename="diagnostic_msgs::msg::dds_::DiagnosticArray_"):
    """diagnostic_msgs/DiagnosticArray."""

    header: Header = field(default_factory=Header)
    status: sequence[DiagnosticStatus] = field(default_factory=list)


# Pixels in a sequence[uint8] are a list of numbers to cyclonedds, which takes a tenth of a second
# to write. As `bytes` they are the same in CDR, but cyclonedds cannot announce a type with them. So
# an image is announced as the one and converted as the other.


@dataclass
class _ImageBytes(IdlStruct, typename="sensor_msgs::msg::dds_::Image_"):
    header: Header
    height: uint32
    width: uint32
    encoding: str
    is_bigendian: uint8
    step: uint32
    data: bytes


@dataclass
class _CompressedImageBytes(IdlStruct, typename="sensor_msgs::msg::dds_::CompressedImage_"):
    header: Header
    format: str
    data: bytes


def _values(message: Any) -> list[Any]:
    return [getattr(message, each.name) for each in dataclasses.fields(message)]


@dataclass
class Image(IdlStruct, typename="sensor_msgs::msg::dds_::Image_"):
    """sensor_msgs/Image; `data` are bytes."""

    header: Header = field(default_factory=Header)
    height: uint32 = 0
    width: uint32 = 0
    encoding: str = ""
    is_bigendian: uint8 = 0
    step: uint32 = 0
    data: Octets = b""

    def serialize(self, *args: Any, **kwargs: Any) -> bytes:
        return bytes(_ImageBytes(*_values(self)).serialize(*args, **kwargs))

    @classmethod
    def deserialize(cls, *args: Any, **kwargs: Any) -> "Image":
        return cls(*_values(_ImageBytes.deserialize(*args, **kwargs)))


@dataclass
class CompressedImage(IdlStruct, typename="sensor_msgs::msg::dds_::CompressedImage_"):
    """sensor_msgs/CompressedImage; `data` are bytes."""

    header: Header = field(default_factory=Header)
    format: str = ""
    data: Octets = b""

    def serialize(self, *args: Any, **kwargs: Any) -> bytes:
        return bytes(_CompressedImageBytes(*_values(self)).serialize(*args, **kwargs))

    @classmethod
    def deserialize(cls, *args: Any, **kwargs: Any) -> "CompressedImage":
        return cls(*_values(_CompressedImageBytes.deserialize(*args, **kwargs)))
