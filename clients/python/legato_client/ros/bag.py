"""A bag with its answers. Needs mcap and mcap-ros2-support (the extra `ros`)."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import io
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from mcap.exceptions import McapError
from mcap.reader import McapReader, make_reader
from mcap.records import Channel, Message, Schema
from mcap.well_known import Profile
from mcap.writer import Writer
from mcap_ros2.decoder import DecoderFactory

from legato_client import ros2
from legato_client._errors import LegatoError
from legato_client._images.sources import ImageInput
from legato_client._types.results import Result
from legato_client.batch.run import is_about_image
from legato_client.ros import cdr, images

_LIBRARY = "legato"
_QUALITY = 90  # JPEG quality of drawings

Outcomes = Sequence[Result | LegatoError]
Ask = Callable[[ImageInput], Outcomes]
"""Called with an image; raises LegatoError, OSError or ValueError."""


class BagError(Exception):
    """The bag or an option is not fit for it; the message is for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Topics:
    """Topic names of images, answers and drawings, and patterns of copied topics."""

    image: str
    detections: str
    drawings: str = ""
    copied: tuple[str, ...] = ()

    def is_copied(self, topic: str) -> bool:
        """Return whether to copy a topic: never what an earlier run wrote to this run's topics."""
        own = topic in (self.detections, self.drawings)
        return not own and any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.copied)


@dataclasses.dataclass(slots=True)
class BagCounts:
    """Outcome of a bag; `problems` has each failed image's error."""

    images: int = 0
    failed: int = 0
    detections: int = 0
    copied: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


class Bag:
    """ROS 2 bag opened for reading, as `ros2 bag record -s mcap` writes it."""

    def __init__(self, path: Path, topic: str) -> None:
        """Open the bag. Raises OSError, and BagError for other files and topics without images."""
        self._file = path.open("rb")
        try:
            self.reader = _reader_of(self._file, path)
            self.num_images = self._check(path, topic)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Bag:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check(self, path: Path, topic: str) -> int:
        try:
            summary = self.reader.get_summary()
        except McapError as error:
            raise BagError(f"{path} is not a whole bag: {error}") from None
        if summary is None:
            raise BagError(f"{path} has no summary: `mcap recover` makes one")
        self.topics = {channel.topic for channel in summary.channels.values()}
        kinds = {
            channel.topic: summary.schemas[channel.schema_id].name
            for channel in summary.channels.values()
            if channel.schema_id in summary.schemas
        }
        image_kinds = (cdr.IMAGE, cdr.COMPRESSED_IMAGE)
        if kinds.get(topic) not in image_kinds:
            known = sorted(name for name, kind in kinds.items() if kind in image_kinds)
            what = f"is {kinds[topic]}" if topic in kinds else "is not in the bag"
            raise BagError(f"{topic} {what}; topics with images: {', '.join(known) or 'none'}")
        counts = summary.statistics.channel_message_counts if summary.statistics else {}
        return sum(
            counts.get(number, 0)
            for number, channel in summary.channels.items()
            if channel.topic == topic
        )


class BagAnswerer:
    """Writer of a bag's answers in message order, with `parallel` images in flight.

    At most four times as many messages wait for them.
    """

    def __init__(self, ask: Ask, topics: Topics, *, parallel: int, absent_score: float) -> None:
        self._ask = ask
        self._topics = topics
        self._parallel = parallel
        self._absent_score = absent_score
        self.count = BagCounts()

    def perform(
        self, bag: Bag, out: IO[bytes], on_image: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        """Write all answers; call `on_image` after each image, `give_up` to end open calls.

        Raises:
            LegatoError: `ask` failed for a reason unrelated to the image.
            BagError: the bag cannot be read to its end.
            OSError: a file cannot be read or written.
        """
        writer = _BagWriter(out, self._topics)
        pool = futures.ThreadPoolExecutor(self._parallel, "legato-bag")
        waiting: collections.deque[Callable[[], None]] = collections.deque()
        decoders = DecoderFactory()
        read = [n for n in bag.topics if n == self._topics.image or self._topics.is_copied(n)]
        try:
            for schema, channel, message in bag.reader.iter_messages(topics=read):
                if self._topics.is_copied(channel.topic):
                    waiting.append(functools.partial(self._copy, writer, schema, channel, message))
                if channel.topic == self._topics.image:
                    decode = decoders.decoder_for(channel.message_encoding, schema)
                    answer = pool.submit(self._answer, decode, message.data)
                    waiting.append(
                        functools.partial(self._write, writer, message, answer, on_image)
                    )
                while len(waiting) > 4 * self._parallel:
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()
            writer.finish()
        except BaseException as error:
            give_up()
            if isinstance(error, McapError):
                raise BagError(f"the bag cannot be read to its end: {error}") from None
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _copy(
        self, writer: _BagWriter, schema: Schema | None, channel: Channel, message: Message
    ) -> None:
        writer.copy(schema, channel, message)
        self.count.copied += 1

    # ------------------------------------------------------------ worker threads

    def _answer(
        self, decode: Callable[[bytes], Any] | None, data: bytes
    ) -> tuple[ros2.Detection2DArray, bytes] | str:
        """Return the array and the drawing, or the image's error message."""
        try:
            if decode is None:
                raise ValueError("its definition is no ros2msg")
            image = decode(data)
            shown = images.read(image)
            outcomes = self._ask(shown)
            failure = next((each for each in outcomes if isinstance(each, LegatoError)), None)
            if failure is not None:
                return str(failure)
            array = images.of(outcomes, image.header, _size(outcomes), self._absent_score)
            drawing = b""
            if self._topics.drawings:
                drawn = _drawn(shown, outcomes)
                message = SimpleNamespace(header=array.header, format="jpeg", data=drawn)
                drawing = cdr.encode(cdr.COMPRESSED_IMAGE, message)
        except (LegatoError, OSError, ValueError, struct.error) as error:
            if isinstance(error, LegatoError) and not is_about_image(error):
                raise
            return str(error)
        return array, drawing

    def _write(
        self,
        writer: _BagWriter,
        message: Message,
        answer: futures.Future[tuple[ros2.Detection2DArray, bytes] | str],
        on_image: Callable[[], None],
    ) -> None:
        found = answer.result()
        self.count.images += 1
        if isinstance(found, str):
            self.count.failed += 1
            self.count.problems.append(f"image at {message.log_time / 1e9:.9f}: {found}")
        else:
            array, drawing = found
            self.count.detections += len(array.detections)
            writer.write(self._topics.detections, cdr.encode(cdr.DETECTIONS, array), message)
            if drawing:
                writer.write(self._topics.drawings, drawing, message)
        on_image()


class _BagWriter:
    """Writer of messages of this program's topics, and of copies of others."""

    def __init__(self, out: IO[bytes], topics: Topics) -> None:
        self._writer = Writer(out)
        self._writer.start(profile=Profile.ROS2, library=_LIBRARY)
        self._schema = functools.cache(self._writer.register_schema)
        self._channels: dict[tuple[str, int, str], int] = {}
        kinds = {topics.detections: cdr.DETECTIONS}
        if topics.drawings:
            kinds[topics.drawings] = cdr.COMPRESSED_IMAGE
        self._own: dict[str, int] = {}
        for topic, kind in kinds.items():
            schema = self._schema(kind, "ros2msg", cdr.text_of(kind).encode())
            self._own[topic] = self._channel(topic, schema, "cdr", {})

    def write(self, topic: str, data: bytes, source: Message) -> None:
        """Write a message with the times of its image."""
        self._add(self._own[topic], data, source)

    def copy(self, schema: Schema | None, channel: Channel, message: Message) -> None:
        kind = 0 if schema is None else self._schema(schema.name, schema.encoding, schema.data)
        number = self._channel(channel.topic, kind, channel.message_encoding, channel.metadata)
        self._add(number, message.data, message)

    def finish(self) -> None:
        self._writer.finish()  # type: ignore[no-untyped-call]  # mcap's gap

    def _add(self, channel: int, data: bytes, source: Message) -> None:
        self._writer.add_message(
            channel, source.log_time, data, source.publish_time, source.sequence
        )

    def _channel(self, topic: str, schema: int, encoding: str, about: Mapping[str, str]) -> int:
        key = topic, schema, encoding
        if key not in self._channels:
            self._channels[key] = self._writer.register_channel(
                topic, encoding, schema, dict(about)
            )
        return self._channels[key]


def _reader_of(file: IO[bytes], path: Path) -> McapReader:
    try:
        reader = make_reader(file)
        profile = reader.get_header().profile
    except (McapError, struct.error) as error:  # the latter for a file that is too short
        raise BagError(f"{path} is no MCAP file: {error}") from None
    if profile not in ("", Profile.ROS2):
        raise BagError(f"{path} is of profile {profile!r}, not of ROS 2")
    return reader


def _size(outcomes: Outcomes) -> tuple[int, int]:
    for each in outcomes:
        if not isinstance(each, LegatoError) and each.info.image is not None:
            return each.info.image.width, each.info.image.height
    raise ValueError("the server did not say how large the image is")


def _drawn(image: ImageInput, outcomes: Outcomes) -> bytes:
    from legato_client import draw  # needs Pillow

    marks = itertools.chain.from_iterable(map(draw.marks_of, outcomes))
    data = io.BytesIO()
    draw.annotate(image, marks).save(data, "JPEG", quality=_QUALITY)
    return data.getvalue()
