"""ROS 2 node over DDS: images in, detections out."""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cyclonedds.core import DDSException, Policy, Qos, ReadCondition, SampleState, WaitSet
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

from legato_client import ros2
from legato_client._client import Client
from legato_client._errors import LegatoError
from legato_client.ros import images, messages
from legato_client.ros.health import Health
from legato_client.stream.feed import AnsweredFrame, Feed, FeedSettings
from legato_client.stream.frames import FrameCounters

MessageT = TypeVar("MessageT", bound=IdlStruct)

_NAME = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")
_DEPTH = 10  # messages that a late reader still gets, as in ROS 2 by default

SENSOR_DATA = Qos(
    Policy.Reliability.BestEffort, Policy.Durability.Volatile, Policy.History.KeepLast(1)
)
"""For reading images: writers may be reliable or not, and only the newest image counts."""
DEFAULT = Qos(
    Policy.Reliability.Reliable(duration(milliseconds=100)),
    Policy.Durability.Volatile,
    Policy.History.KeepLast(_DEPTH),
)
LATCHED = Qos(
    Policy.Reliability.Reliable(duration(milliseconds=100)),
    Policy.Durability.TransientLocal,
    Policy.History.KeepLast(1),
)
"""A late subscriber gets the last message too."""


def dds_name(topic: str) -> str:
    """Return a topic's DDS name. Raises ValueError for one that ROS 2 would refuse."""
    if not _NAME.fullmatch(topic):
        raise ValueError(f"a topic is /NAME or /NAME/NAME of letters, digits and _, not {topic!r}")
    return f"rt{topic}"


class Participant:
    """DDS participant in one domain; CYCLONEDDS_URI configures it."""

    def __init__(self, domain: int) -> None:
        """Join the domain. Raises DDSException without such a domain or a network."""
        self._own = DomainParticipant(domain)

    def wait_set(self) -> WaitSet:
        return WaitSet(self._own)

    def reader(self, topic: str, kind: type[MessageT], qos: Qos) -> DataReader[MessageT]:
        return DataReader(self._own, Topic(self._own, dds_name(topic), kind), _announced(qos, kind))

    def writer(self, topic: str, kind: type[MessageT], qos: Qos) -> DataWriter[MessageT]:
        return DataWriter(self._own, Topic(self._own, dds_name(topic), kind), _announced(qos, kind))


def _announced(qos: Qos, kind: type[IdlStruct]) -> Qos:
    """Add the type's hash: Jazzy and later log a warning about an endpoint without."""
    return Qos(*qos, Policy.Userdata(f"typehash=RIHS01_{messages.TYPE_HASHES[kind]};".encode()))


_POLL_INTERVAL = duration(milliseconds=200)  # how often a thread checks the stop flag


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """Topic names and publishing options.

    An object without a confidence gets `absent_score`; diagnostics are published every `period`
    seconds. Tracked objects are predicted `prediction_rate` times a second, to the topic
    `predictions` unless that is empty.

    `by_arrival`: ages count from an image's arrival, not from its stamp, as with simulated time.
    """

    image: str
    compressed: bool
    detections: str
    info: str
    diagnostics: str
    name: str
    domain: int
    by_arrival: bool
    absent_score: float
    period: float
    predictions: str
    prediction_rate: float


class Node:
    """ROS node that answers the newest image, and publishes results and periodic diagnostics.

    It survives servers and waits for the first one. `operator` is a client that may read the
    engine's state.
    """

    def __init__(
        self,
        client: Client,
        operator: Client,
        settings: FeedSettings,
        parameters: Parameters,
        on_server: Callable[[str], None],
    ) -> None:
        """Open the topics; `on_server` is called at each change of the server's state.

        Raises:
            ValueError: for a bad name.
            DDSException: without a network.
        """
        self._parameters = parameters
        self._operator = operator
        self.counters = FrameCounters(settings.max_age, on_server)
        self._health = Health(self.counters)
        self._feed = Feed(client, settings, self._publish, self.counters, patience=None, waits=True)
        self._stopped = threading.Event()
        self._engine = "unknown"
        self._published_model = ""
        kind = messages.CompressedImage if parameters.compressed else messages.Image
        self._participant = participant = Participant(parameters.domain)
        self._unpublished = 0
        self._wait_set = participant.wait_set()
        self._images = participant.reader(parameters.image, kind, SENSOR_DATA)
        self._detections = participant.writer(
            parameters.detections, messages.Detection2DArray, DEFAULT
        )
        self._diagnostics = participant.writer(
            parameters.diagnostics, messages.DiagnosticArray, DEFAULT
        )
        self._info = participant.writer(parameters.info, messages.VisionInfo, LATCHED)
        self._predictions: DataWriter[messages.Detection2DArray] | None = None
        if parameters.predictions:
            self._predictions = participant.writer(
                parameters.predictions, messages.Detection2DArray, DEFAULT
            )
        self._latest: AnsweredFrame | None = None
        self._count = 0

    def stop(self) -> None:
        """End soon; thread-safe, and safe in a signal handler."""
        self._stopped.set()

    def run(self) -> None:
        """Return once stopped. Raises LegatoError for a failure that any session would meet."""
        problems: list[LegatoError] = []
        threads = [
            threading.Thread(target=work, name=f"legato-{name}", daemon=True)
            for name, work in (
                ("send", functools.partial(self._send, problems)),
                ("images", self._read),
                ("engine", self._ask_engine),
                ("predict", self._predict),
            )
        ]
        for thread in threads:
            thread.start()
        while not self._stopped.wait(self._parameters.period):
            self._publish_diagnostics()
        self._feed.stop()
        for thread in threads[:2]:
            thread.join()
        self._publish_diagnostics()
        if problems:
            raise problems[0]

    # ------------------------------------------------------------ threads

    def _send(self, problems: list[LegatoError]) -> None:
        try:
            self._feed.run()
        except LegatoError as error:
            problems.append(error)
        finally:
            self._stopped.set()

    def _read(self) -> None:
        condition = ReadCondition(self._images, SampleState.Any)
        self._wait_set.attach(condition)
        while not self._stopped.is_set():
            if not self._wait_set.wait(_POLL_INTERVAL):
                continue
            try:
                samples = self._images.take(1)
            except (struct.error, ValueError):  # a message of another shape
                self.counters.count("unreadable")
                continue
            for sample in samples:
                if isinstance(sample, messages.Image | messages.CompressedImage):
                    self._take(sample)

    def _ask_engine(self) -> None:
        """Ask the engine on a separate thread: a hanging server must not delay diagnostics."""
        while not self._stopped.wait(self._parameters.period):
            try:
                self._engine = self._operator.load().engine_state
            except LegatoError as error:
                self._engine = f"unknown: {error.reason or error.code}"

    def _predict(self) -> None:
        """Publish where tracked objects are now, by the images' clock."""
        if self._predictions is None:
            return
        while not self._stopped.wait(1 / self._parameters.prediction_rate):
            latest, now_ns = self._latest, time.time_ns()
            if latest is not None:
                tracks = self._feed.now(now_ns)
                array = images.predicted(latest, now_ns, tracks, self._parameters.absent_score)
                self._write(self._predictions, ros2.to_ros(array, messages))

    # ------------------------------------------------------------ images

    def _take(self, sample: messages.Image | messages.CompressedImage) -> None:
        if sample.header.stamp.sec < 0:  # no time of ROS
            self.counters.count("unreadable")
        else:
            number, self._count = self._count, self._count + 1
            by_arrival = self._parameters.by_arrival
            self._feed.offer(images.captured(sample, number, by_arrival=by_arrival))

    # ------------------------------------------------------------ publishing

    def _publish(self, answered: AnsweredFrame) -> None:
        """Publish results; nothing for a failed task, since an empty array means no objects."""
        self._publish_model()
        outcomes = tuple(answered.outcomes.values())
        header, image = answered.frame.origin, answered.image
        if any(isinstance(each, LegatoError) for each in outcomes) or image is None:
            return
        assert isinstance(header, messages.Header), "it is put there with the image"
        size = image.width, image.height
        array = images.of(outcomes, header, size, self._parameters.absent_score)
        self._write(self._detections, ros2.to_ros(array, messages))
        self._latest = answered

    def _publish_model(self) -> None:
        model = self._feed.model
        if model != self._published_model:
            self._published_model = model
            info = messages.VisionInfo(_now(), method=model, database_location="")
            self._write(self._info, info)

    def _publish_diagnostics(self) -> None:
        level, message, values = self._health.now(self._engine)
        values["not published"] = str(self._unpublished)
        status = messages.DiagnosticStatus(
            int(level),
            f"{self._parameters.name}: {self._parameters.image}",
            message,
            self._feed.model,
            [messages.KeyValue(key, value) for key, value in values.items()],
        )
        self._write(self._diagnostics, messages.DiagnosticArray(_now(), [status]))

    def _write(self, writer: DataWriter[MessageT], message: MessageT) -> None:
        """Write a message; one that DDS refuses must not end the node: the next one is newer."""
        try:
            writer.write(message)
        except DDSException:
            self._unpublished += 1


def _now() -> messages.Header:
    sec, nanosec = divmod(time.time_ns(), 1_000_000_000)
    return messages.Header(messages.Time(sec, nanosec), "")
