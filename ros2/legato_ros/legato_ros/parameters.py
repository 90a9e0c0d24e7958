"""Parameters of the node: names, defaults, limits, and when a change takes effect."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from legato_client import Sampling
from legato_client.batch import tasks as task_names
from legato_client.stream.feed import FeedSettings
from rcl_interfaces.msg import FloatingPointRange, ParameterDescriptor

Value = bool | float | str | list[str]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TOPIC = re.compile(r"(~?/)?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*")


class When(enum.Enum):
    """Moment at which a parameter is read."""

    START = "start"
    CONFIGURE = "configure"
    ANY_TIME = "any time"


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Parameter; `check` raises ValueError for a value that the descriptor cannot exclude."""

    name: str
    default: Value
    description: str
    when: When = When.ANY_TIME
    limits: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], object] | None = None

    def descriptor(self) -> ParameterDescriptor:
        ranges = []
        if self.limits is not None:
            low, high = self.limits
            ranges = [FloatingPointRange(from_value=low, to_value=high, step=0.0)]
        constraints = [f"one of {', '.join(self.choices)}"] if self.choices else []
        if self.when is When.CONFIGURE:
            constraints.append("read when the node is configured")
        return ParameterDescriptor(
            description=self.description,
            additional_constraints="; ".join(constraints),
            read_only=self.when is When.START,
            floating_point_range=ranges,
        )

    def validate(self, name: str, value: Any) -> None:
        """Raise ValueError for a value that the parameter, called `name`, cannot have."""
        try:
            if self.choices and value not in self.choices:
                raise ValueError(f"one of {', '.join(self.choices)}, not {value!r}")
            if self.check is not None:
                self.check(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _check_cameras(names: list[str]) -> None:
    if not names:
        raise ValueError("at least one camera")
    if len(set(names)) < len(names):
        raise ValueError(f"two cameras have one name: {names}")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a name is letters, digits and _, not {name!r}")


def _check_topic(topic: str) -> None:
    if topic and not _TOPIC.fullmatch(topic):
        raise ValueError(f"a topic is NAME/NAME of letters, digits and _, not {topic!r}")


def _check_tasks(names: list[str]) -> None:
    if not names:
        raise ValueError(f"at least one task: {task_names.usage()}")
    task_names.parse_all(names, Sampling(), None)


NODE = (
    Spec("cameras", ["camera"], "names of the cameras, each with its own parameters", When.START,
         check=_check_cameras),
    Spec("autostart", True, "configure and activate at the start; false: a lifecycle manager does",
         When.START),
    Spec("server", "127.0.0.1:50051", "address of the Legato server", When.CONFIGURE),
    Spec("token_file", "", "file with the token; empty: LEGATO_TOKEN, if set", When.CONFIGURE),
    Spec("ca", "", "file with the certificates of the server's authority: TLS", When.CONFIGURE),
    Spec("cert", "", "file with a client certificate", When.CONFIGURE),
    Spec("key", "", "file with the client certificate's key", When.CONFIGURE),
    Spec("timeout", 10.0, "seconds that a service waits for the server", When.CONFIGURE,
         (0.1, 600.0)),
    Spec("diagnostics_period", 1.0, "seconds between two diagnostics", When.CONFIGURE, (0.1, 60.0)),
    Spec("model", "", "model; empty: the server's default"),
    Spec("adapter", "", "adapter; empty: none"),
    Spec("absent_score", math.nan, "score of results without a confidence"),
)  # fmt: skip
CAMERA = (
    Spec("image", "", "topic of images; empty: NAME/image_raw", When.CONFIGURE, check=_check_topic),
    Spec("transport", "raw", "sensor_msgs/Image, or CompressedImage of the topic IMAGE/compressed",
         When.CONFIGURE, choices=("raw", "compressed")),
    Spec("depth", "", "topic of aligned depth images; empty: no 3D", When.CONFIGURE,
         check=_check_topic),
    Spec("camera_info", "", "topic of intrinsics; empty: camera_info beside the image",
         When.CONFIGURE, check=_check_topic),
    Spec("depth_slop", 0.05, "seconds between the stamps of an image and of its depth",
         When.CONFIGURE, (0.0, 1.0)),
    Spec("prediction_rate", 30.0, "messages of tracks per second", When.CONFIGURE, (0.1, 200.0)),
    Spec("tasks", ["detect:person"], "tasks of each image", check=_check_tasks),
    Spec("track", True, "follow detected objects from image to image"),
    Spec("min_confidence", 0.0, "leave out less certain objects; 0: none", limits=(0.0, 1.0)),
    Spec("max_age", 0.0, "seconds after which an image is dropped; 0: never", limits=(0.0, 60.0)),
    Spec("by_arrival", False, "ages count from an image's arrival, not from its stamp"),
    Spec("silence", 2.0, "seconds without an image or depth that diagnostics report",
         limits=(0.1, 600.0)),
    Spec("jump", 1.0, "seconds by which stamps may leave the clock before it is reported",
         limits=(0.05, 3600.0)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSettings:
    """Values of the node's own parameters."""

    cameras: list[str]
    autostart: bool
    server: str
    token_file: str
    ca: str
    cert: str
    key: str
    timeout: float
    diagnostics_period: float
    model: str
    adapter: str
    absent_score: float


@dataclasses.dataclass(frozen=True, slots=True)
class CameraSettings:
    """Values of a camera's parameters, with topics in place of empty ones.

    `by_arrival` is also set with simulated time, whose stamps the server's clock cannot age.
    """

    name: str
    image: str
    transport: str
    depth: str
    camera_info: str
    depth_slop: float
    prediction_rate: float
    tasks: list[str]
    track: bool
    min_confidence: float
    max_age: float
    by_arrival: bool
    silence: float
    jump: float

    @property
    def image_topic(self) -> str:
        """The topic of its transport, as image_transport names it."""
        suffix = "/compressed" if self.transport == "compressed" else ""
        return self.image if self.image.endswith(suffix) else self.image + suffix

    def feed(self, node: NodeSettings) -> FeedSettings:
        """Build the session's settings. Raises ValueError for tasks that are none."""
        least = self.min_confidence or None
        return FeedSettings(
            tasks=task_names.parse_all(self.tasks, Sampling(), None, least),
            max_age=self.max_age or None,
            model=node.model,
            adapter=node.adapter,
            name=self.name,
            track=self.track,
        )


def specs(cameras: list[str]) -> dict[str, Spec]:
    """Return every parameter of a node with these cameras by its full name."""
    own = {spec.name: spec for spec in NODE}
    return own | {f"{camera}.{spec.name}": spec for camera in cameras for spec in CAMERA}


def node_settings(values: Mapping[str, Any]) -> NodeSettings:
    """Build the node's settings from the values of all parameters."""
    return NodeSettings(**{spec.name: values[spec.name] for spec in NODE})


def camera_settings(camera: str, values: Mapping[str, Any], sim_time: bool) -> CameraSettings:
    """Build a camera's settings from the values of all parameters."""
    own = {spec.name: values[f"{camera}.{spec.name}"] for spec in CAMERA}
    image = own["image"] = own["image"] or f"{camera}/image_raw"
    if own["depth"] and not own["camera_info"]:
        base = image.removesuffix("/compressed")
        own["camera_info"] = base[: base.rfind("/") + 1] + "camera_info"
    own["by_arrival"] = own["by_arrival"] or sim_time
    return CameraSettings(name=camera, **own)
