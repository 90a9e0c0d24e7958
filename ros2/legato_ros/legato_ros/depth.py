"""Results in 3D: each image's results joined with its depth, as messages and markers."""

from __future__ import annotations

import collections
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import std_msgs.msg
import vision_msgs.msg
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Point, Pose, Vector3
from legato_client import FrameStamp, ros2
from legato_client.depth import Lifted, lift
from legato_client.draw import PALETTE
from legato_client.stream.feed import AnsweredFrame
from legato_client.stream.outputs import marks
from message_filters import ApproximateTimeSynchronizer, Subscriber
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from legato_ros.monitor import TopicMonitor, stamp_ns
from legato_ros.parameters import CameraSettings

_WAITING = 30  # images whose depth or result is still to come
_QUEUE = 10  # messages of each topic in which depth is looked for
_PATIENCE_S = 0.5  # that a call waits for the depth of its image
_MAX_UNLIFTED = 2  # results; a slow computer lifts the newest
_MARKER_LIFETIME = Duration(sec=2, nanosec=0)  # for the last ones of a node that ends
_SHALLOWEST = 0.01  # metres; a marker without a side is not drawn
_DTYPES = {"16UC1": np.uint16, "mono16": np.uint16, "32FC1": np.float32}

OnLifted = Callable[[tuple[Lifted, ...], FrameStamp], None]


def depth_array(image: Any) -> np.ndarray[Any, Any]:
    """Convert a depth image. Raises ValueError for another encoding, or too few bytes."""
    if image.encoding not in _DTYPES:
        raise ValueError(f"encoding is one of {', '.join(_DTYPES)}, not {image.encoding!r}")
    dtype = np.dtype(_DTYPES[image.encoding])
    step = image.step or image.width * dtype.itemsize
    data = np.frombuffer(image.data, np.uint8)
    if step < image.width * dtype.itemsize or data.size < image.height * step:
        raise ValueError(
            f"{image.width}x{image.height} {image.encoding} with {step} bytes a row has only "
            f"{data.size} bytes"
        )
    rows = data[: image.height * step].reshape(image.height, step)
    own = np.ascontiguousarray(rows[:, : image.width * dtype.itemsize]).view(dtype)
    return own.byteswap() if bool(image.is_bigendian) != (sys.byteorder == "big") else own


class DepthTopics:
    """Subscriptions to depth and intrinsics, and the results that wait for theirs.

    `on_lifted` gets what was lifted and the image's stamp, from a thread of its own. Depth is
    matched to images by stamps at most `depth_slop` seconds apart. `settings` may be replaced.
    """

    def __init__(
        self,
        node: Any,
        images: Subscriber,
        settings: CameraSettings,
        on_lifted: OnLifted,
        callback_group: Any,
    ) -> None:
        self.settings = settings
        self._node = node
        self._on_lifted = on_lifted
        self._work: queue.Queue[tuple[AnsweredFrame, Any, Any] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._run, name="legato-depth", daemon=True)
        self._worker.start()
        self._changed = threading.Condition()  # guards the two below, by the image's stamp
        self._depths: collections.OrderedDict[int, tuple[Any, Any]] = collections.OrderedDict()
        self._results: collections.OrderedDict[int, AnsweredFrame] = collections.OrderedDict()
        topics = {settings.depth: Image, settings.camera_info: CameraInfo}
        self._subscribers = [
            Subscriber(
                node,
                kind,
                topic,
                qos_profile=qos_profile_sensor_data,
                callback_group=callback_group,
            )
            for topic, kind in topics.items()
        ]
        self.monitors = [
            TopicMonitor(node.resolve_topic_name(topic), f"sensor_msgs/msg/{kind.__name__}")
            for topic, kind in topics.items()
        ]
        for subscriber, monitor in zip(self._subscribers, self.monitors, strict=True):
            subscriber.registerCallback(self._note, monitor)
        self._synchronizer = ApproximateTimeSynchronizer(
            [images, *self._subscribers], _QUEUE, max(settings.depth_slop, 1e-6)
        )
        self._synchronizer.registerCallback(self._match)

    def destroy(self) -> None:
        for subscriber in self._subscribers:
            self._node.destroy_subscription(subscriber.sub)
        self._work.put(None)
        self._worker.join()

    def reset(self) -> None:
        """Forget what waits: the synchronizer would prefer stamps from before a jump back."""
        with self._synchronizer.lock:
            for waiting in self._synchronizer.queues:
                waiting.clear()
        with self._changed:
            self._depths.clear()
            self._results.clear()

    def add(self, answered: AnsweredFrame) -> None:
        """Lift a result, now or once its depth has come."""
        stamp = stamp_ns(_Stamped(answered.frame.origin))
        with self._changed:
            matched = self._depths.get(stamp)
            if matched is None:
                self._results[stamp] = answered
                self._note_lost()
        if matched is not None:
            self._submit(answered, *matched)

    def lift_newest(self, answered: AnsweredFrame) -> tuple[Lifted, ...]:
        """Lift the result of a call; nothing if the image's depth is not there soon."""
        stamp = stamp_ns(_Stamped(answered.frame.origin))
        with self._changed:
            self._changed.wait_for(lambda: stamp in self._depths, _PATIENCE_S)
            matched = self._depths.get(stamp)
        return () if matched is None else self._lifted(answered, *matched)

    def _note(self, message: Any, monitor: TopicMonitor) -> None:
        now_ns = self._node.get_clock().now().nanoseconds
        monitor.note(message, now_ns, self.settings.jump, by_arrival=self.settings.by_arrival)

    def _match(self, image: Any, depth: Any, info: Any) -> None:
        stamp = stamp_ns(image)
        with self._changed:
            answered = self._results.pop(stamp, None)
            self._depths[stamp] = depth, info  # kept: a call may be about the same image
            if len(self._depths) > _WAITING:
                self._depths.popitem(last=False)
            self._changed.notify_all()
        if answered is not None:
            self._submit(answered, depth, info)

    def _submit(self, answered: AnsweredFrame, depth: Any, info: Any) -> None:
        """Leave the work to the thread: the synchronizer holds its lock meanwhile."""
        if self._work.qsize() < _MAX_UNLIFTED:
            self._work.put((answered, depth, info))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._lift(*work)

    def _note_lost(self) -> None:
        if len(self._results) > _WAITING:
            self._results.popitem(last=False)
            self.monitors[0].note_problem(
                "images without depth", "no depth and intrinsics match the image's stamp"
            )

    def _lift(self, answered: AnsweredFrame, depth: Any, info: Any) -> None:
        lifted = self._lifted(answered, depth, info)
        header: Any = answered.frame.origin
        if lifted or not marks(answered):
            self._on_lifted(lifted, ros2.frame_stamp(header, 0))

    def _lifted(self, answered: AnsweredFrame, depth: Any, info: Any) -> tuple[Lifted, ...]:
        """Return what can be lifted; a depth that cannot be used is a problem of its topic."""
        found, size = marks(answered), answered.image
        if not found:
            return ()
        try:
            array = depth_array(depth)
            if size is not None and array.shape != (size.height, size.width):
                raise ValueError(
                    f"depth is {depth.width}x{depth.height}, but the image is "
                    f"{size.width}x{size.height}: align the depth image to the camera's"
                )
            lifted = lift(found, array, info)
        except ValueError as error:
            which = 1 if str(error).startswith("intrinsics") else 0
            self.monitors[which].note_problem("unusable", str(error))
            return ()
        nowhere = [each for each in lifted if each.center is None]
        if nowhere:
            self.monitors[0].note_problem(
                "objects without depth",
                f"{len(nowhere)} of {len(lifted)} objects have no depth: {nowhere[0].reason}",
            )
        return lifted


class _Stamped:
    """Message of which only the header is kept."""

    def __init__(self, header: Any) -> None:
        self.header = header


# ---------------------------------------------------------------- messages


def detections(lifted: tuple[Lifted, ...], stamp: FrameStamp, absent_score: float) -> Any:
    """Build the vision_msgs/Detection3DArray."""
    array = ros2.detections_3d(lifted, stamp, absent_score=absent_score)
    return ros2.to_ros(array, vision_msgs.msg)


def markers(lifted: tuple[Lifted, ...], stamp: FrameStamp, camera: str) -> Any:
    """Build the visualization_msgs/MarkerArray: a cube and a label for each object."""
    labels = list(dict.fromkeys(each.mark.label for each in lifted))
    found = [Marker(header=_header(stamp), ns=camera, action=Marker.DELETEALL)]
    for each in lifted:
        if each.center is None:
            continue
        x, y, z = map(float, each.center)
        sides = each.size or (0.05, 0.05, 0.05)
        width, height, depth = (max(float(side), _SHALLOWEST) for side in sides)
        red, green, blue = (
            part / 255 for part in PALETTE[labels.index(each.mark.label) % len(PALETTE)]
        )
        text = " ".join(filter(None, (each.mark.label, getattr(each.mark, "track_id", ""))))
        for kind, place, scale, alpha, words in (
            (Marker.CUBE, (x, y, z), (width, height, depth), 0.4, ""),
            (Marker.TEXT_VIEW_FACING, (x, y - height / 2, z), (0.0, 0.0, 0.06), 1.0, text),
        ):
            found.append(
                Marker(
                    header=_header(stamp),
                    ns=camera,
                    id=len(found),
                    type=kind,
                    action=Marker.ADD,
                    pose=Pose(position=Point(x=place[0], y=place[1], z=place[2])),
                    scale=Vector3(x=scale[0], y=scale[1], z=scale[2]),
                    color=ColorRGBA(r=red, g=green, b=blue, a=alpha),
                    lifetime=_MARKER_LIFETIME,
                    text=words,
                )
            )
    return MarkerArray(markers=found)


def _header(stamp: FrameStamp) -> Any:
    """Build the std_msgs/Header of the image."""
    return ros2.to_ros(ros2.header(stamp), std_msgs.msg)
