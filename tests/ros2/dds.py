"""A peer of the node on DDS: cameras that it shows, and what it hears, as JSON on its output.

`python -m tests.ros2.dds DOMAIN` shows images with depth until it has heard every topic that it
lists, and decodes each with the client's own types where the client has them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
import types
import zlib
from functools import cache
from typing import Any

import numpy as np
from cyclonedds.core import Policy, Qos
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl import types as idl
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from legato_client.ros import messages
from legato_client.ros.node import dds_name

from tests.e2e.ros_bus import LOOPBACK
from tests.e2e.scenes import SIZE, two_shapes
from tests.ros2.interfaces import ARRAY, BASE, NAME, OWN, STORE

RELIABILITY = {
    "reliable": Policy.Reliability.Reliable(duration(seconds=1)),
    "best effort": Policy.Reliability.BestEffort,
}
DURABILITY = {
    "volatile": Policy.Durability.Volatile,
    "transient local": Policy.Durability.TransientLocal,
}
QUALITIES = tuple(itertools.product(RELIABILITY, DURABILITY))
TOPICS = {
    "/legato/camera/detections": "vision_msgs/msg/Detection2DArray",
    "/legato/camera/tracks": "vision_msgs/msg/Detection2DArray",
    "/legato/camera/mask": "sensor_msgs/msg/Image",
    "/legato/camera/annotated/compressed": "sensor_msgs/msg/CompressedImage",
    "/legato/camera/answers": "legato_msgs/msg/Answer",
    "/legato/camera/vision_info": "vision_msgs/msg/VisionInfo",
    "/legato/camera/detections_3d": "vision_msgs/msg/Detection3DArray",
    "/legato/camera/markers": "visualization_msgs/msg/MarkerArray",
    "/diagnostics": "diagnostic_msgs/msg/DiagnosticArray",
}
IMAGE, DEPTH, INFO = "/camera/image_raw", "/camera/depth", "/camera/camera_info"
_PATIENCE = 120.0  # seconds


def quality(reliability: str, durability: str) -> Qos:
    return Qos(RELIABILITY[reliability], DURABILITY[durability], Policy.History.KeepLast(10))


def names_of(qos: Qos) -> tuple[str, str]:
    """Return the words for a quality that discovery has told."""
    reliable = isinstance(qos[Policy.Reliability], Policy.Reliability.Reliable)
    latched = qos[Policy.Durability] == Policy.Durability.TransientLocal
    return (
        "reliable" if reliable else "best effort",
        "transient local" if latched else "volatile",
    )


class Peer:
    """Participant with topics of any type, by ROS's names."""

    def __init__(self, domain: int) -> None:
        self._own = DomainParticipant(domain)

    def reader(self, topic: str, kind: Any, qos: Qos) -> Any:
        return DataReader(self._own, Topic(self._own, dds_name(topic), kind), qos)

    def writer(self, topic: str, kind: Any, qos: Qos) -> Any:
        return DataWriter(self._own, Topic(self._own, dds_name(topic), kind), qos)


# ---------------------------------------------------------------- types


def idl_name(name: str) -> str:
    """Return the name that ROS 2 gives a type on DDS; those of services are of their folder."""
    package, _, short = name.split("/")
    own = short.rpartition("_")[0]
    folder = next((kind for kind, names in OWN.items() if own and own in names), "msg")
    return f"{package}::{folder}::dds_::{short}_"


@cache
def struct(name: str) -> Any:
    """Make a type of DDS from the definition; large ones are the client's, which takes bytes."""
    short = name.rpartition("/")[2]
    if name in ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"):
        return getattr(messages, short)
    members: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
    for field, kind in STORE.fielddefs[name][1]:
        members["__annotations__"][field] = _idl(kind)
    made = types.new_class(
        short, (IdlStruct,), {"typename": idl_name(name)}, lambda own: own.update(members)
    )
    return dataclasses.dataclass(made)


def _idl(kind: Any) -> Any:
    node, detail = kind
    if node == NAME:
        return struct(detail)
    if node == BASE:
        plain = {"bool": bool, "string": str, "byte": idl.byte}
        return plain.get(detail[0]) or getattr(idl, detail[0])
    element, size = detail
    make_array: Any = idl.array
    make_sequence: Any = idl.sequence
    return make_array[_idl(element), size] if node == ARRAY else make_sequence[_idl(element)]


def fill(name: str, other: Any) -> Any:
    """Convert a message of any library to DDS's."""
    if name in ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"):
        return struct(name)(
            *(
                fill_field(kind, getattr(other, field))
                for field, kind in STORE.fielddefs[name][1][:-1]
            ),
            bytes(other.data),
        )
    fields = STORE.fielddefs[name][1]
    return struct(name)(*(fill_field(kind, getattr(other, field)) for field, kind in fields))


def fill_field(kind: Any, value: Any) -> Any:
    node, detail = kind
    if node == NAME:
        if detail == "std_msgs/msg/Header":  # the client's, as in its images
            stamp = messages.Time(value.stamp.sec, value.stamp.nanosec)
            return messages.Header(stamp, value.frame_id)
        return fill(detail, value)
    if node == BASE:
        return value[0] if detail[0] == "byte" and isinstance(value, bytes) else value
    return [fill_field(detail[0], each) for each in value]


def document(value: Any) -> Any:
    """Return a message of any library as JSON values; bytes as their checksum."""
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        own = [name for name in names if name.islower() and not name.startswith("__")]
        return {name: document(getattr(value, name)) for name in own}  # without constants
    if isinstance(value, np.ndarray) and value.dtype != np.uint8:
        return value.tolist()
    if isinstance(value, bytes | np.ndarray):
        return zlib.crc32(bytes(value)) if len(value) else []
    if isinstance(value, list | tuple):
        return [document(each) for each in value]
    return value if value == value else "NaN"


# ---------------------------------------------------------------- the peer


def _client_type(name: str) -> Any:
    return getattr(messages, name.rpartition("/")[2], None) or struct(name)


def main(domain: int) -> None:
    kept = Domain(domain, LOOPBACK)
    peer = Peer(domain)
    readers = {}
    for topic, name in TOPICS.items():
        latched = topic.endswith("vision_info")
        wanted = quality("reliable", "transient local" if latched else "volatile")
        readers[topic] = peer.reader(topic, _client_type(name), wanted)
    matrix = [
        peer.reader(f"/matrix_{n}", struct("std_msgs/msg/String"), quality(*own))
        for n in range(len(QUALITIES))
        for own in QUALITIES
    ]
    kinds = (IMAGE, "Image"), (DEPTH, "Image"), (INFO, "CameraInfo")
    writers = [
        peer.writer(topic, struct(f"sensor_msgs/msg/{kind}"), quality("best effort", "volatile"))
        for topic, kind in kinds
    ]
    heard: dict[str, list[Any]] = {topic: [] for topic in readers}
    end = time.monotonic() + _PATIENCE
    while not all(heard.values()) and time.monotonic() < end:
        _show(writers)
        time.sleep(0.1)
        for topic, reader in readers.items():
            samples = [each for each in reader.take(50) if dataclasses.is_dataclass(each)]
            heard[topic] += [each for each in samples if _is_filled(topic, each)]
    found = {topic: document(each[:5]) for topic, each in heard.items()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the other side has seen which readers matched
    del matrix, kept


def _is_filled(topic: str, message: Any) -> bool:
    """Return whether a message shows more than its header."""
    lists = ("detections", "markers")
    return all(len(getattr(message, name, "x")) > 0 for name in lists)


def _show(writers: list[Any]) -> None:
    stamp = messages.Time(*divmod(time.time_ns(), 10**9))
    header = messages.Header(stamp, "camera_optical")
    width, height = SIZE
    pixels, depth = two_shapes().image.tobytes(), np.full(SIZE[::-1], 1500, np.uint16).tobytes()
    image_writer, depth_writer, info_writer = writers
    image_writer.write(messages.Image(header, height, width, "rgb8", 0, 3 * width, pixels))
    depth_writer.write(messages.Image(header, height, width, "16UC1", 0, 2 * width, depth))
    info = struct("sensor_msgs/msg/CameraInfo")
    roi = struct("sensor_msgs/msg/RegionOfInterest")(0, 0, 0, 0, False)
    k = [300.0, 0.0, width / 2, 0.0, 300.0, height / 2, 0.0, 0.0, 1.0]
    info_writer.write(
        info(header, height, width, "plumb_bob", [], k, [0.0] * 9, [0.0] * 12, 0, 0, roi)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
