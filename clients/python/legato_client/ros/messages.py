"""Messages of ROS 2 as types of Cyclone DDS. Needs cyclonedds (the extra `dds`).

Types that a bag has, too, are made from their definitions in `cdr`; the others are written out.
Names, the order of fields and defaults are those of Humble and later, vision_msgs 4.
"""

import dataclasses
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, byte, float64, int32, uint8, uint32

from legato_client.ros.cdr import DEFINITIONS

if TYPE_CHECKING:  # for type checkers; `ros2` has the same fields
    from builtins import list as sequence

    from legato_client import ros2

    class Time(ros2.Time, IdlStruct):
        """builtin_interfaces/Time."""

    class Header(ros2.Header, IdlStruct):
        """std_msgs/Header."""

    class Detection2DArray(ros2.Detection2DArray, IdlStruct):
        """vision_msgs/Detection2DArray."""

    Octets = bytes
else:
    from cyclonedds.idl.types import sequence

    Octets = sequence[uint8]

_PLAIN = {
    "int32": (int32, 0),
    "uint32": (uint32, 0),
    "float64": (float64, 0.0),
    "string": (str, ""),
}


def _make(name: str) -> type[IdlStruct]:
    """Make a type from its definition, after those of its parts."""
    package, short = name.split("/")
    of: Any
    made: Any
    array_of: Any = array
    sequence_of: Any = sequence
    members: dict[str, Any] = {"__annotations__": {}, "__doc__": f"{name}.", "__module__": __name__}
    for line in DEFINITIONS[name].splitlines():
        kind, member, *value = line.split()
        element, _, size = kind.removesuffix("]").partition("[")
        of, default = _PLAIN.get(element) or (globals()[element.split("/")[1]], None)
        if size:
            of, made = array_of[of, int(size)], field(default_factory=([default] * int(size)).copy)
        elif kind.endswith("]"):
            of, made = sequence_of[of], field(default_factory=list)
        elif default is None:
            made = field(default_factory=of)
        else:
            made = float(value[0]) if value else default
        members["__annotations__"][member], members[member] = of, made
    options = {"typename": f"{package}::msg::dds_::{short}_"}
    return dataclass(types.new_class(short, (IdlStruct,), options, lambda own: own.update(members)))


for _name in DEFINITIONS:
    if not _name.startswith("sensor_msgs/"):  # below, as their pixels are special
        globals()[_name.split("/")[1]] = _make(_name)


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

    level: byte = 0
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


TYPE_HASHES: dict[type[IdlStruct], str] = {
    Image: "d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47",
    CompressedImage: "15640771531571185e2efc8a100baf923961a4d15d5569652e6cb6691e8e371a",
    Detection2DArray: "214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968",
    VisionInfo: "95d3116a17484ad91c9a2686e1d54890bbfc3ff6c6a2de137738c4950d45d284",
    DiagnosticArray: "5a8a36efb05fb25070fa0fb3810290c0e6cd4862b54a8fb975a1ee8dc55a333e",
}
"""RIHS01 hashes of the topics' types, as rosidl computes them from ROS 2's definitions."""
