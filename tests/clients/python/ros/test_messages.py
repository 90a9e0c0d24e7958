"""Messages as Cyclone DDS writes them, against rosbags."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cyclonedds", reason="its wheels follow new Pythons late")

from legato_client import ros2
from legato_client.ros import messages

from tests.clients.python.ros.test_cdr import array
from tests.clients.python.ros.vision import typestore
from tests.clients.python.test_ros2 import array_3d

STORE = typestore()
HEADER = messages.Header(messages.Time(1_700_000_000, 987_654_321), "camera")
STATUS = messages.DiagnosticStatus(
    1, "legato", "no images", "tiny", [messages.KeyValue("age", "0.5"), messages.KeyValue("", "")]
)
EXAMPLES = [
    ("sensor_msgs", messages.Image(HEADER, 2, 3, "rgb8", 0, 9, bytes(range(18)))),
    ("sensor_msgs", messages.Image()),
    ("sensor_msgs", messages.CompressedImage(HEADER, "jpeg", b"\xff\xd8 file")),
    ("vision_msgs", ros2.to_ros(array("cup", "red ball"), messages)),
    ("vision_msgs", messages.Detection2DArray(HEADER)),
    ("vision_msgs", ros2.to_ros(array_3d(), messages)),
    (
        "geometry_msgs",
        ros2.to_ros(ros2.PointStamped(array().header, ros2.Point(1, 2, 3)), messages),
    ),
    ("vision_msgs", messages.VisionInfo(HEADER, "moondream2", "somewhere", 3)),
    ("diagnostic_msgs", messages.DiagnosticArray(HEADER, [STATUS])),
]


@pytest.mark.parametrize(("package", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_bytes_are_those_of_rosbags(package, message):
    """What rosbags reads has the same values, and it writes the same bytes again."""
    kind = f"{package}/msg/{type(message).__name__}"
    data = message.serialize()
    read = STORE.deserialize_cdr(data, kind)
    assert plain(read) == plain(message)
    # rosbags pads the end of a message, which says nothing.
    assert bytes(STORE.serialize_cdr(read, kind)).rstrip(b"\0") == data.rstrip(b"\0")
    assert type(message).deserialize(data) == message


@pytest.mark.parametrize(("package", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_types_are_named_as_ros_names_them(package, message):
    """And so are the types of which they are made."""
    name = type(message).__idl_typename__.replace(".", "::")
    assert name == f"{package}::msg::dds_::{type(message).__name__}_"


def plain(value):
    """Values of either library, without their classes and constants."""
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        names = [name for name in names if not (name.startswith("_") or name.isupper())]
        return {name: plain(getattr(value, name)) for name in names}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes | list | tuple):
        return [plain(each) for each in value]
    return value
