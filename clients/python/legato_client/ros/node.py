"""Images of a topic to a server, and what it finds to topics."""

from __future__ import annotations

import dataclasses
import functools
import struct
import threading
import time

from cyclonedds.core import DDSException, ReadCondition, SampleState
from cyclonedds.pub import DataWriter
from cyclonedds.util import duration
from PIL import Image as PillowImage

from legato_client import ros2
from legato_client._client import Client
from legato_client._errors import LegatoError
from legato_client._images.pillow import open_upright
from legato_client._images.sources import ImageInput
from legato_client.live.feed import Asked, Feed
from legato_client.live.figures import Figures
from legato_client.live.lane import Answered
from legato_client.live.shot import Shot
from legato_client.ros import arrays, messages, pictures
from legato_client.ros.diagnostics import Health
from legato_client.ros.participant import DEFAULT, LATCHED, SENSOR_DATA, MessageT, Participant

_LOOK = duration(milliseconds=200)  # how soon a thread sees that it should end


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """Names of topics, and what is told: an object without a confidence has `absent_score`, and
    diagnostics come every `period` seconds.

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


class Node:
    """Answers the newest image, publishes what is found, and once in a `period` how it goes.

    It outlives servers and waits for the first one. `operator` is a client that may ask about the
    engine's state.
    """

    def __init__(
        self, client: Client, operator: Client, asked: Asked, parameters: Parameters
    ) -> None:
        """Raises ValueError for a topic's name, and DDSException without a network."""
        self._parameters = parameters
        self._operator = operator
        self.figures = Figures()
        self._health = Health(self.figures)
        self._feed = Feed(client, asked, self._publish, self.figures, patience=None, waits=True)
        self._stopped = threading.Event()
        self._engine = "unknown"
        self._told_model = ""
        kind = messages.CompressedImage if parameters.compressed else messages.Image
        self._participant = participant = Participant(parameters.domain)
        self._unpublished = 0
        self._waiting = participant.waiting()
        self._images = participant.reader(parameters.image, kind, SENSOR_DATA)
        self._found = participant.writer(parameters.detections, messages.Detection2DArray, DEFAULT)
        self._told = participant.writer(parameters.diagnostics, messages.DiagnosticArray, DEFAULT)
        self._info = participant.writer(parameters.info, messages.VisionInfo, LATCHED)
        self._count = 0

    def stop(self) -> None:
        """End soon; for any thread, and a signal's handler."""
        self._stopped.set()

    def run(self) -> None:
        """Return once stopped. Raises LegatoError for what no other session would change."""
        problems: list[LegatoError] = []
        threads = [
            threading.Thread(target=work, name=f"legato-{name}", daemon=True)
            for name, work in (
                ("send", functools.partial(self._send, problems)),
                ("images", self._read),
                ("engine", self._ask_engine),
            )
        ]
        for thread in threads:
            thread.start()
        while not self._stopped.wait(self._parameters.period):
            self._tell()
        self._feed.stop()
        for thread in threads[:2]:
            thread.join()
        self._tell()
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
        self._waiting.attach(condition)
        while not self._stopped.is_set():
            if not self._waiting.wait(_LOOK):
                continue
            try:
                samples = self._images.take(1)
            except (struct.error, ValueError):  # a message of another shape
                self.figures.count("unreadable")
                continue
            for sample in samples:
                if isinstance(sample, messages.Image | messages.CompressedImage):
                    self._take(sample)

    def _ask_engine(self) -> None:
        """In a thread of its own: a server that hangs must not keep diagnostics back."""
        while not self._stopped.wait(self._parameters.period):
            try:
                self._engine = self._operator.load().engine_state
            except LegatoError as error:
                self._engine = f"unknown: {error.reason or error.code}"

    # ------------------------------------------------------------ images

    def _take(self, sample: messages.Image | messages.CompressedImage) -> None:
        if sample.header.stamp.sec < 0:  # no time of ROS
            self.figures.count("unreadable")
        else:
            self._feed.offer(self._shot(sample))

    def _shot(self, sample: messages.Image | messages.CompressedImage) -> Shot:
        number, self._count = self._count, self._count + 1
        arrived_ns = time.time_ns()
        stamp = ros2.frame_stamp(sample.header, 0)
        captured_ns = None if self._parameters.by_arrival else stamp.capture_time_ns
        return Shot(
            number,
            0.0,
            captured_ns or arrived_ns,
            functools.partial(_sent, sample),
            functools.partial(_picture, sample),
            stamp.frame_id,
            sample.header,
        )

    # ------------------------------------------------------------ what is published

    def _publish(self, answered: Answered) -> None:
        """Nothing where a task failed: an empty array would say that nothing is there."""
        self._tell_model()
        outcomes = tuple(answered.outcomes.values())
        header, image = answered.shot.origin, answered.image
        if any(isinstance(each, LegatoError) for each in outcomes) or image is None:
            return
        assert isinstance(header, messages.Header), "it is put there with the image"
        size = image.width, image.height
        array = arrays.of(outcomes, header, size, self._parameters.absent_score)
        self._write(self._found, ros2.to_ros(array, messages))

    def _tell_model(self) -> None:
        model = self._feed.model
        if model != self._told_model:
            self._told_model = model
            info = messages.VisionInfo(_now(), method=model, database_location="")
            self._write(self._info, info)

    def _tell(self) -> None:
        level, message, values = self._health.now(self._engine)
        values["not published"] = str(self._unpublished)
        status = messages.DiagnosticStatus(
            int(level),
            f"{self._parameters.name}: {self._parameters.image}",
            message,
            self._feed.model,
            [messages.KeyValue(key, value) for key, value in values.items()],
        )
        self._write(self._told, messages.DiagnosticArray(_now(), [status]))

    def _write(self, writer: DataWriter[MessageT], message: MessageT) -> None:
        """A message that DDS does not take must not end the node: the next one is newer."""
        try:
            writer.write(message)
        except DDSException:
            self._unpublished += 1


def _now() -> messages.Header:
    sec, nanosec = divmod(time.time_ns(), 1_000_000_000)
    return messages.Header(messages.Time(sec, nanosec), "")


def _sent(sample: messages.Image | messages.CompressedImage) -> ImageInput:
    if isinstance(sample, messages.Image):
        return pictures.raw(sample)
    return pictures.compressed(sample)


def _picture(sample: messages.Image | messages.CompressedImage) -> PillowImage.Image:
    return open_upright(_sent(sample))
