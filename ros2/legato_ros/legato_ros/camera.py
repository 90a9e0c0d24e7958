"""One camera: its topics, its session with the server, and its diagnostics."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import io
import threading
import time
from typing import Any

import numpy as np
import std_msgs.msg
import vision_msgs.msg
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue
from legato_client import (
    Client,
    ImageInfo,
    LegatoError,
    Outline,
    Result,
    Sampling,
    TrackNow,
    draw,
    ros2,
)
from legato_client.batch import tasks
from legato_client.depth import Lifted, mask
from legato_client.ros import images
from legato_client.ros.health import Health, Level
from legato_client.stream.feed import AnsweredFrame, Feed
from legato_client.stream.frames import CapturedFrame, FrameCounters
from legato_client.stream.outputs import BackgroundWorker, Drawing, marks
from legato_msgs.msg import Answer
from message_filters import Subscriber
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from sensor_msgs.msg import CompressedImage, Image
from visualization_msgs.msg import MarkerArray

from legato_ros import depth
from legato_ros.monitor import TopicMonitor
from legato_ros.parameters import CameraSettings, NodeSettings

_RETRY_S = 5.0  # after a session that the server refused
_JPEG_QUALITY = 80
_MAX_INSTANCES = 255  # values of a mono8 image

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
NEWEST = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
"""For images: a subscriber may be reliable or best effort, and only the newest counts."""
LATCHED = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
"""A late subscriber gets the last message too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Topic that a camera publishes, below the node's and the camera's name."""

    topic: str
    kind: Any
    qos: QoSProfile
    description: str
    needs: str = ""
    """Parameter without which it is not published."""


OUTPUTS = (
    Output("detections", vision_msgs.msg.Detection2DArray, RELIABLE,
           "results of an image, with its header"),
    Output("tracks", vision_msgs.msg.Detection2DArray, RELIABLE,
           "tracked objects where they are now, at prediction_rate", "track"),
    Output("mask", Image, NEWEST,
           "mono8: n where the n-th detection of the image's array is, if it is an outline"),
    Output("annotated/compressed", CompressedImage, NEWEST,
           "image with its results drawn, JPEG; only for subscribers"),
    Output("answers", Answer, RELIABLE, "text of query and caption tasks"),
    Output("vision_info", vision_msgs.msg.VisionInfo, LATCHED, "model in `method`"),
    Output("detections_3d", vision_msgs.msg.Detection3DArray, RELIABLE,
           "results of an image in 3D, with its header", "depth"),
    Output("markers", MarkerArray, RELIABLE, "cube and label of each object in 3D", "depth"),
)  # fmt: skip


class Camera:
    """Camera of an active node. It survives servers and waits for the first one."""

    def __init__(
        self,
        node: Any,
        settings: CameraSettings,
        shared: NodeSettings,
        publishers: dict[str, Any],
    ) -> None:
        """Make a camera that publishes with `publishers`, by the topics of `OUTPUTS`."""
        self.settings = settings
        self._shared = shared
        self.newest: CapturedFrame | None = None
        self._node = node
        self._publishers = publishers
        self._kind = Image if settings.transport == "raw" else CompressedImage
        self._topic = node.resolve_topic_name(settings.image_topic)
        self._monitor = TopicMonitor(self._topic, f"sensor_msgs/msg/{self._kind.__name__}")
        self._counters = FrameCounters(settings.max_age or None, self._on_server)
        self._health = Health(self._counters)
        self._changed = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._is_stopped = True
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        self._closing = contextlib.ExitStack()
        self._depth: depth.DepthTopics | None = None
        self._painter: BackgroundWorker | None = None
        self._latest: AnsweredFrame | None = None
        self._model = ""
        self._refusal = ""
        self._number = 0

    # ------------------------------------------------------------ life

    def start(self, client: Client) -> None:
        """Subscribe, and open a session as soon as there is a server."""
        self._is_stopped = False
        self._painter = BackgroundWorker(self._paint, every=False)
        self._closing.callback(self._painter.close)
        group = MutuallyExclusiveCallbackGroup()
        self._monitor = TopicMonitor(self._topic, self._monitor.kind)
        subscriber = Subscriber(
            self._node,
            self._kind,
            self.settings.image_topic,
            qos_profile=qos_profile_sensor_data,
            callback_group=group,
        )
        subscriber.registerCallback(self._take)
        self._closing.callback(self._node.destroy_subscription, subscriber.sub)
        if self.settings.depth:
            self._depth = depth.DepthTopics(
                self._node, subscriber, self.settings, self._publish_3d, group
            )
            self._closing.callback(self._depth.destroy)
        self._thread = threading.Thread(
            target=self._run, args=(client,), name=f"legato-{self.settings.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Unsubscribe and end the session; frames in flight are given up."""
        if self._thread is None:
            return
        with self._lock:
            self._is_stopped = True
            feed = self._feed
        self._changed.set()
        if feed is not None:
            feed.stop()
        self._thread.join()
        self._closing.close()
        self._thread = self._depth = self.newest = self._latest = None

    def change(self, settings: CameraSettings, shared: NodeSettings) -> None:
        """Use other settings, from the next image on."""
        self.settings, self._shared = settings, shared
        if self._depth is not None:
            self._depth.settings = settings
        with self._lock:
            feed = self._feed
        if feed is not None:
            feed.change(settings.feed(shared))
        self._changed.set()

    def _run(self, client: Client) -> None:
        """Keep a feed running; one that the server refuses is tried again after a while."""
        while True:
            self._changed.clear()
            with self._lock:
                if self._is_stopped:
                    return
                self._feed = feed = Feed(
                    client,
                    self.settings.feed(self._shared),
                    self._publish,
                    self._counters,
                    patience=None,
                    waits=True,
                )
            try:
                feed.run()
            except LegatoError as error:
                self._refusal = f"the server refuses: {error.message}"
                self._node.get_logger().error(f"{self.settings.name}: {self._refusal}")
                self._changed.wait(_RETRY_S)

    def _on_server(self, state: str) -> None:
        self._node.get_logger().info(f"{self.settings.name}: server {state}")

    # ------------------------------------------------------------ images

    def _take(self, message: Any) -> None:
        settings = self.settings
        if message.header.stamp.sec < 0:
            self._monitor.note_problem("unreadable", "an image is stamped before 1970")
            return
        now_ns = self._node.get_clock().now().nanoseconds
        by_arrival = settings.by_arrival
        jumped_back = self._monitor.note(message, now_ns, settings.jump, by_arrival=by_arrival)
        topics = self._depth  # another thread may stop the camera
        if jumped_back and topics is not None:
            topics.reset()
        self._number += 1
        frame = images.captured(message, self._number, by_arrival=by_arrival)
        self.newest = dataclasses.replace(frame, read=lambda: self._read(frame))
        feed = self._feed
        if feed is not None:
            feed.offer(self.newest)

    def _read(self, frame: CapturedFrame) -> Any:
        try:
            return frame.read()
        except ValueError as error:
            self._monitor.note_problem("unreadable", str(error))
            raise

    # ------------------------------------------------------------ results

    def _publish(self, answered: AnsweredFrame) -> None:
        """Publish results; nothing for a failed task, since an empty array means no objects."""
        self._refusal = ""
        self._publish_model()
        header: Any = answered.frame.origin
        for task, outcome in answered.outcomes.items():
            if not isinstance(outcome, LegatoError) and outcome.text:
                self._send("answers", _answer(header, task, outcome))
        placed = {
            task: outcome
            for task, outcome in answered.outcomes.items()
            if tasks.have_places([tasks.parse(task, Sampling(), None)])
        }
        failed = any(isinstance(each, LegatoError) for each in placed.values())
        if failed or not placed or answered.image is None:
            return
        shown = AnsweredFrame(answered.frame, placed, answered.image, answered.age)
        size = answered.image.width, answered.image.height
        found = images.of(tuple(placed.values()), header, size, self._shared.absent_score)
        self._send("detections", ros2.to_ros(found, vision_msgs.msg))
        self._latest = shown
        self._publish_mask(shown, answered.image)
        if self._depth is not None:
            self._depth.add(shown)
        drawn = self._publishers["annotated/compressed"]
        if self._painter is not None and drawn.get_subscription_count():
            self._painter.submit(Drawing(answered.frame, marks(shown)))

    def _publish_model(self) -> None:
        model = self._feed.model if self._feed is not None else ""
        if model != self._model:
            self._model = model
            stamp = self._node.get_clock().now().to_msg()
            header = std_msgs.msg.Header(stamp=stamp)
            self._send("vision_info", vision_msgs.msg.VisionInfo(header=header, method=model))

    def _publish_mask(self, answered: AnsweredFrame, size: ImageInfo) -> None:
        found = marks(answered)
        if not any(isinstance(each, Outline) for each in found):
            return
        pixels = np.zeros((size.height, size.width), np.uint8)
        for number, each in enumerate(found[:_MAX_INSTANCES], 1):
            if isinstance(each, Outline):
                pixels[mask(each, size.width, size.height)] = number
        message = Image(
            header=answered.frame.origin,
            height=size.height,
            width=size.width,
            encoding="mono8",
            step=size.width,
            data=array.array("B", pixels.tobytes()),
        )
        self._send("mask", message)

    def _paint(self, drawing: Drawing) -> None:
        """Publish a drawing; an image that cannot be decoded was refused by the server."""
        with contextlib.suppress(OSError, ValueError):
            drawn = draw.annotate(drawing.frame.image(), drawing.marks)
            file = io.BytesIO()
            drawn.save(file, "JPEG", quality=_JPEG_QUALITY)
            data = array.array("B", file.getvalue())
            header: Any = drawing.frame.origin
            self._send(
                "annotated/compressed", CompressedImage(header=header, format="jpeg", data=data)
            )

    def _publish_3d(self, lifted: tuple[Lifted, ...], stamp: Any) -> None:
        score = self._shared.absent_score
        self._send("detections_3d", depth.detections(lifted, stamp, score))
        self._send("markers", depth.markers(lifted, stamp, self.settings.name))

    def publish_tracks(self) -> None:
        """Publish the tracked objects where they are now, by the images' clock."""
        latest, feed, now_ns = self._latest, self._feed, time.time_ns()
        if latest is None or feed is None or not self.settings.track:
            return
        tracks: tuple[TrackNow, ...] = feed.now(now_ns)
        found = images.predicted(latest, now_ns, tracks, self._shared.absent_score)
        self._send("tracks", ros2.to_ros(found, vision_msgs.msg))

    def lift(self, frame: CapturedFrame, result: Result) -> Any:
        """Build the Detection3DArray of a result about a frame; empty without the frame's depth."""
        answered = AnsweredFrame(frame, {"": result}, result.info.image, 0.0)
        topics = self._depth  # another thread may stop the camera
        lifted = () if topics is None else topics.lift_newest(answered)
        header: Any = frame.origin
        return depth.detections(lifted, ros2.frame_stamp(header, 0), self._shared.absent_score)

    def _send(self, topic: str, message: Any) -> None:
        """Publish, unless the topic is not configured or the node is being shut down."""
        publisher = self._publishers.get(topic)
        if publisher is None:
            return
        try:
            publisher.publish(message)
        except RuntimeError:  # RCLError, InvalidHandle: the context or the topic ended first
            if self._node.context.ok() and not self._is_stopped:
                raise

    # ------------------------------------------------------------ diagnostics

    def status(self) -> Any:
        """Build the diagnostic_msgs/DiagnosticStatus; it names the cause of what is wrong."""
        level, message, values = self._health.now()
        topics = self._depth  # another thread may stop the camera
        monitors = [self._monitor, *(topics.monitors if topics is not None else ())]
        problems = [
            problem
            for monitor in monitors
            for problem in monitor.problems(self.settings.silence, self._published(monitor.topic))
        ]
        if self._thread is None:
            level, message, problems = Level.OK, "inactive", []
        elif self._refusal:
            level, message = Level.ERROR, self._refusal
        if problems:
            message = "; ".join(problems if level is not Level.ERROR else [message, *problems])
            level = max(level, Level.WARN)
        for monitor in monitors:
            for kind, count in sorted(monitor.counts.items()):
                values[f"{monitor.topic}: {kind}"] = str(count)
        return DiagnosticStatus(
            level=bytes([level]),
            name=f"{self._node.get_fully_qualified_name()}: {self.settings.name}",
            message=message,
            hardware_id=self._model,
            values=[KeyValue(key=key, value=value) for key, value in values.items()],
        )

    def _published(self, topic: str) -> list[str]:
        infos = self._node.get_publishers_info_by_topic(topic)
        return [info.topic_type for info in infos]


def _answer(header: Any, task: str, outcome: Result) -> Any:
    reason = outcome.info.finish_reason
    return Answer(header=header, task=task, text=outcome.text, finish_reason=reason)
