"""The ROS 2 node and its messages."""

from __future__ import annotations

import dataclasses
import time

import pytest
from legato_client import ros2
from legato_client.ros import messages
from legato_client.ros.health import Health, Level
from legato_client.stream.frames import FrameCounters

from tests.clients.python.ros.bags import typestore
from tests.clients.python.ros.test_bag import array
from tests.clients.python.ros.test_ros2 import array_3d

# ---------------------------------------------------------------- node parts
# What a node is called, and what it says of itself.

participant = pytest.importorskip(
    "legato_client.ros.node", reason="wheels of cyclonedds follow new Pythons late"
)


@pytest.mark.parametrize("topic", ["/camera/image_raw", "/a", "/_x/Y9"])
def test_topics_are_named_as_in_ros(topic):
    """With rt in front."""
    assert participant.dds_name(topic) == f"rt{topic}"


@pytest.mark.parametrize("topic", ["", "/", "camera", "/camera/", "//camera", "/9", "/a b", "/a\n"])
def test_other_names_are_refused(topic):
    """The message says what a name is."""
    with pytest.raises(ValueError, match="a topic is /NAME"):
        participant.dds_name(topic)


def connected() -> FrameCounters:
    counters = FrameCounters()
    counters.server = "connected"
    return counters


def test_a_lost_server_is_an_error():
    """Whatever was answered before."""
    counters = connected()
    counters.count("taken")
    counters.count_answered(0.1, 0)
    counters.server = "lost: connection refused"
    level, message, values = Health(counters).now("serving")
    assert (level, message) == (Level.ERROR, "server lost: connection refused")
    assert (values["answered"], values["age"], values["age p95"]) == ("1", "0.100", "0.100")


@pytest.mark.parametrize("engine", ["lost", "stuck"])
def test_a_lost_engine_is_an_error(engine):
    """Though its server is there."""
    assert Health(connected()).now(engine)[:2] == (Level.ERROR, f"engine {engine}")


def test_silence_is_a_warning():
    """Of the camera, else of the server."""
    counters = connected()
    health = Health(counters)
    assert health.now("serving")[:2] == (Level.WARN, "no images")
    counters.count("taken")
    assert health.now("serving")[:2] == (Level.WARN, "no answers")
    counters.count_answered(0.1, 0)
    assert health.now("serving")[:2] == (Level.OK, "answering")


def test_failed_tasks_are_told_once():
    """In the period in which they failed."""
    counters = connected()
    health = Health(counters)
    counters.count("taken")
    counters.count_answered(0.1, 3)
    assert health.now("serving")[:2] == (Level.WARN, "3 tasks failed")
    assert health.now("serving")[:2] == (Level.OK, "answering")


def test_the_cause_of_an_unreadable_image_is_told():
    """Once, in the period in which it came."""
    counters = connected()
    health = Health(counters)
    counters.count("taken")
    counters.count_answered(0.1, 0)
    counters.problem = "640 x 480 rgb8 need 921600 bytes, got 300"
    counters.count("unreadable")
    told = "1 images cannot be read: 640 x 480 rgb8 need 921600 bytes, got 300"
    assert health.now("serving")[:2] == (Level.WARN, told)
    assert health.now("serving")[:2] == (Level.OK, "answering")


def test_an_engine_of_unknown_state_is_no_fault():
    """Its state is told as it is."""
    counters = connected()
    counters.count("taken")
    counters.count_answered(time.time() * 0, 0)
    level, _, values = Health(counters).now("unknown: PERMISSION_DENIED")
    assert (level, values["engine"]) == (Level.OK, "unknown: PERMISSION_DENIED")


# ---------------------------------------------------------------- messages
# Messages as Cyclone DDS writes them, against rosbags.

pytest.importorskip("cyclonedds", reason="its wheels follow new Pythons late")


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


def test_type_hashes_are_those_of_the_definitions():
    """A graph of ROS 2 compares them with its own: `ros2 topic info --verbose`."""
    for kind, found in messages.TYPE_HASHES.items():
        package, _, _, name = kind.__idl_typename__.replace(".", "::").split("::")
        assert STORE.hash_rihs01(f"{package}/msg/{name.rstrip('_')}") == f"RIHS01_{found}"


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
