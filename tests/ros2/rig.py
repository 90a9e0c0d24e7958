"""A node on the stand-in's graph, with cameras that the test shows images on."""

from __future__ import annotations

import array
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from legato_ros.node import LegatoNode
from PIL import Image as PillowImage

from tests.e2e.scenes import two_shapes
from tests.e2e.server import until
from tests.ros2 import interfaces, standin
from tests.ros2.interfaces import CLASSES
from tests.ros2.standin import Parameter, graph

FRAME = "camera_optical"


@contextlib.contextmanager
def running(
    server: str, parameters: dict[str, Any], *, activate: bool = True, **arguments: Any
) -> Iterator[LegatoNode]:
    """Run a node in an empty graph, by default an active one; `arguments` are rclpy's own."""
    graph.clear()
    values = {"server": server, "diagnostics_period": 0.1, "autostart": activate, **parameters}
    overrides = [Parameter(name, None, value) for name, value in values.items()]
    node = LegatoNode(parameter_overrides=overrides, **arguments)
    try:
        node.start()
        assert node.state == ("active" if activate else "unconfigured"), node.logged
        yield node
    finally:
        node.close()


def heard(topic: str, kind: str, qos: Any = 100) -> Any:
    """Subscribe from now on; a deque of messages."""
    return graph.listen(topic, CLASSES[kind], qos)


def time_message(ns: int) -> Any:
    sec, nanosec = divmod(ns, 10**9)
    return CLASSES["builtin_interfaces/msg/Time"](sec=sec, nanosec=nanosec)


def header(ns: int | None = None, frame: str = FRAME) -> Any:
    at = time_message(time.time_ns() if ns is None else ns)
    return CLASSES["std_msgs/msg/Header"](stamp=at, frame_id=frame)


def image_message(
    pixels: PillowImage.Image | np.ndarray[Any, Any], own: Any = None, encoding: str = "rgb8"
) -> Any:
    """Make a sensor_msgs/Image of pixels."""
    values = np.asarray(pixels)
    return CLASSES["sensor_msgs/msg/Image"](
        header=own or header(),
        height=values.shape[0],
        width=values.shape[1],
        encoding=encoding,
        step=values.strides[0],
        data=array.array("B", values.tobytes()),
    )


class Shown:
    """Publisher of a camera, as its driver: best effort."""

    def __init__(self, topic: str, kind: str = "sensor_msgs/msg/Image") -> None:
        self.publisher = standin.Publisher(graph, CLASSES[kind], topic, standin.SENSOR_DATA)

    def show(self, message: Any = None) -> Any:
        """Publish a message, by default two shapes that are seen now; its header."""
        shown = image_message(two_shapes().image) if message is None else message
        self.publisher.publish(shown)
        return shown.header

    def until(self, condition: Any) -> None:
        """Publish images until the condition holds."""

        def holds() -> object:
            if not (found := condition()):
                self.show()
                time.sleep(0.03)
            return found

        until(holds)

    def leave(self) -> None:
        with graph.lock:
            graph.publishers[self.publisher.topic].remove(self.publisher)


def key(own: Any) -> tuple[int, int]:
    return own.stamp.sec, own.stamp.nanosec


def told(diagnostics: Any, text: str, camera: str = "") -> list[Any]:
    """Return the statuses of the last diagnostics with a text, of one camera or of any."""
    statuses = diagnostics[-1].status if diagnostics else []
    return [each for each in statuses if text in each.message and each.name.endswith(camera)]


def request(name: str, **values: Any) -> Any:
    """Make a request or a goal of legato_msgs."""
    return interfaces.CLASSES[f"legato_msgs/msg/{name}"](**values)
