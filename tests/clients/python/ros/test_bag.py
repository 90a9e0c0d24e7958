"""ROS 2 bags, their images and their bytes, against rosbags."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from legato_client import Box, Detection, DetectResult, SegmentResult, Unavailable, ros2
from legato_client._images.pillow import open_upright
from legato_client._images.sources import to_image
from legato_client._types.results import FrameStamp, ImageInfo, Outline, ResponseInfo
from legato_client.ros import cdr, images
from legato_client.ros.bag import Bag, BagAnswerer, BagError, Topics
from PIL import Image

from tests.clients.python.images.test_sources import seen
from tests.clients.python.ros import bags
from tests.clients.python.ros.bags import typestore

TOPIC, OUT, OTHER = "/camera/image_raw", "/legato/detections", "/note"
SECOND = 10**9
INFO = ResponseInfo("", "m", "stop", image=ImageInfo("", 64, 48, False))
CUP = Detection(Box(0.25, 0.25, 0.75, 0.5), "cup", None, "7")


def colour(number: int) -> Image.Image:
    return Image.new("RGB", (64, 48), (number, 0, 0))


def found(image):
    """A cup in every image, and an outline."""
    outline = Outline("M0,0", Box(0, 0, 1, 1), "dog", 0.5)
    return DetectResult((CUP,), INFO), SegmentResult((outline,), INFO)


def answer(path, target, ask, *, parallel=2, told=None, drawings="", copied=()):
    """Write the answers to a bag; the count."""
    topics = Topics(TOPIC, OUT, drawings, copied)
    answerer = BagAnswerer(ask, topics, parallel=parallel, absent_score=1.0)
    tell = (lambda: None) if told is None else (lambda: told.append(1))
    with Bag(path, TOPIC) as bag, target.open("wb") as file:
        answerer.perform(bag, file, tell, lambda: None)
    return answerer.count


def test_answers_have_the_stamps_of_their_images(tmp_path):
    """In the bag's order, with its times, though later images are answered earlier."""
    messages = [(TOPIC, SECOND * n + 7, bags.image(SECOND * n, colour(n))) for n in range(1, 6)]
    path = bags.write(tmp_path / "in", messages)
    second_has_come = threading.Event()

    def ask(frame):
        number = open_red(frame)
        if number == 1:
            assert second_has_come.wait(20)
        second_has_come.set()
        return found(frame)

    told: list[int] = []
    count = answer(path, tmp_path / "out.mcap", ask, told=told)
    assert (count.images, count.failed, count.detections) == (5, 0, 10)
    assert len(told) == 5
    read = bags.read(tmp_path / "out.mcap")
    assert [(topic, time) for topic, time, _ in read] == [(OUT, t) for _, t, _ in messages]
    for (_, _, array), (_, _, image) in zip(read, messages, strict=True):
        assert array.header.stamp == image.header.stamp
        assert array.header.frame_id == "camera"
        cup, dog = array.detections
        assert cup.results[0].hypothesis.class_id == "cup"
        assert cup.results[0].hypothesis.score == 1.0  # stands for none
        assert dog.results[0].hypothesis.score == 0.5
        assert cup.id == "7"
        center = cup.bbox.center.position
        assert (center.x, center.y, cup.bbox.size_x, cup.bbox.size_y) == (32, 18, 32, 12)


def open_red(frame):
    return bytes(frame.data)[0]


def test_compressed_images_and_drawings(tmp_path):
    """The file goes to the server as it is; the drawing is an image with the boxes."""
    file = io.BytesIO()
    colour(9).save(file, "PNG")
    path = bags.write(tmp_path / "in", [(TOPIC, 5, bags.compressed(3, file.getvalue()))])
    asked = []

    def ask(frame):
        asked.append(frame)
        return found(frame)

    answer(path, tmp_path / "out.mcap", ask, drawings="/drawn")
    assert asked == [file.getvalue()]
    written = {topic: message for topic, _, message in bags.read(tmp_path / "out.mcap")}
    drawn = written["/drawn"]
    assert drawn.header.stamp == written[OUT].header.stamp
    image = Image.open(io.BytesIO(drawn.data.tobytes()))
    assert image.format == "JPEG"
    assert len(image.getcolors(1 << 20) or ()) > 50  # not one colour any more


def test_failed_images_are_counted_and_the_rest_is_answered(tmp_path):
    """An encoding that is no image, and one that the server could not read."""
    strange = bags.image(2, colour(2), encoding="16UC1")
    messages = [(TOPIC, n, bags.image(n, colour(n))) for n in (1, 3, 4)]
    path = bags.write(tmp_path / "in", [messages[0], (TOPIC, 2, strange), *messages[1:]])

    def ask(frame):
        if open_red(frame) == 3:
            raise ValueError("no image")
        return found(frame)

    count = answer(path, tmp_path / "out.mcap", ask)
    assert (count.images, count.failed) == (4, 2)
    assert "16UC1" in count.problems[0]
    assert "no image" in count.problems[1]
    assert [time for _, time, _ in bags.read(tmp_path / "out.mcap")] == [1, 4]


def test_other_topics_are_copied_on_request(tmp_path):
    """Bytes, times and definitions; without a request nothing is."""
    note = (OTHER, 2, bags.string("hello"))
    path = bags.write(tmp_path / "in", [(TOPIC, 1, bags.image(1, colour(1))), note])
    assert answer(path, tmp_path / "bare.mcap", found).copied == 0
    assert [topic for topic, _, _ in bags.read(tmp_path / "bare.mcap")] == [OUT]
    assert answer(path, tmp_path / "note.mcap", found, copied=("/no*",)).copied == 1
    topic, time, copy = bags.read(tmp_path / "note.mcap")[1]
    assert (topic, time, copy.data) == (OTHER, 2, "hello")
    assert answer(path, tmp_path / "all.mcap", found, copied=("*",)).copied == 2
    assert [t for t, _, _ in bags.read(tmp_path / "all.mcap")] == [TOPIC, OUT, OTHER]


def test_what_every_image_would_meet_ends_it(tmp_path):
    """The error passes, and what is being asked is given up."""
    messages = [(TOPIC, n, bags.image(n, colour(n))) for n in range(1, 30)]
    path = bags.write(tmp_path / "in", messages)
    asked, given_up = [], []

    def ask(frame):
        asked.append(frame)
        raise Unavailable("gone")

    answerer = BagAnswerer(ask, Topics(TOPIC, OUT), parallel=1, absent_score=0)
    with Bag(path, TOPIC) as bag, pytest.raises(Unavailable):
        answerer.perform(bag, io.BytesIO(), lambda: None, lambda: given_up.append(1))
    assert given_up
    assert len(asked) < len(messages)


def test_a_wrong_topic_is_refused_with_the_right_ones(tmp_path):
    """Before anything is asked; and so is a file that is no bag."""
    messages = [(TOPIC, 1, bags.image(1, colour(1))), (OTHER, 2, bags.string("hello"))]
    path = bags.write(tmp_path / "in", messages)
    with pytest.raises(BagError, match=f"/nowhere is not in the bag.*{TOPIC}"):
        Bag(path, "/nowhere")
    with pytest.raises(BagError, match=f"/note is std_msgs/msg/String.*{TOPIC}"):
        Bag(path, OTHER)
    (tmp_path / "no.mcap").write_bytes(b"no bag at all")
    with pytest.raises(BagError, match="is no MCAP file"):
        Bag(tmp_path / "no.mcap", TOPIC)
    torn = tmp_path / "torn.mcap"
    torn.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BagError, match="torn"):
        Bag(torn, TOPIC)


# ---------------------------------------------------------------- pictures
# Images of ROS 2 as images of the client.

RED = (255, 0, 0)


def image(encoding: str, data: bytes, step: int, size: tuple[int, int] = (2, 2)) -> SimpleNamespace:
    width, height = size
    return SimpleNamespace(encoding=encoding, data=data, step=step, width=width, height=height)


PIXELS = {  # encoding: the bytes of two pixels in a row, and their colours
    "rgb8": (b"\xff\0\0\1\2\3", (RED, (1, 2, 3))),
    "bgr8": (b"\0\0\xff\3\2\1", (RED, (1, 2, 3))),
    "8UC3": (b"\0\0\xff\3\2\1", (RED, (1, 2, 3))),
    "rgba8": (b"\xff\0\0\x07\1\2\3\xff", (RED, (1, 2, 3))),
    "bgra8": (b"\0\0\xff\x07\3\2\1\xff", (RED, (1, 2, 3))),
    "8UC4": (b"\0\0\xff\x07\3\2\1\xff", (RED, (1, 2, 3))),
    "mono8": (b"\0\x7f", ((0, 0, 0), (127, 127, 127))),
    "8UC1": (b"\0\x7f", ((0, 0, 0), (127, 127, 127))),
    "yuv422_yuy2": (bytes((81, 90, 81, 240)), (RED, RED)),
    "yuyv": (bytes((81, 90, 81, 240)), (RED, RED)),
    "yuv422": (bytes((90, 81, 240, 81)), (RED, RED)),
    "uyvy": (bytes((90, 81, 240, 81)), (RED, RED)),
    "nv12": (b"\x51\x51", (RED, RED)),  # a row of chroma follows those of luma
}


@pytest.mark.parametrize("encoding", list(images._FORMATS))
def test_every_encoding_has_its_own_colours(encoding):
    """Drawn on here and decoded by the server, with rows that are padded."""
    row, colours = PIXELS[encoding]
    padded = row + b"\x55\x55"
    data = 2 * padded + (bytes((90, 240)) + b"\x55\x55" if encoding == "nv12" else b"")
    frame = images.raw(image(encoding, data, len(padded)))
    shown, served = np.asarray(open_upright(frame)), seen(to_image(frame))
    exact = encoding[:3] not in ("yuv", "yuy", "uyv", "nv1")
    for pixels in (shown, served):
        assert pixels.shape == (2, 2, 3)
        assert np.abs(pixels.astype(int) - colours).max() <= (0 if exact else 4)


@pytest.mark.parametrize("encoding", ["16UC1", "bayer_rggb8", "32FC1", ""])
def test_other_encodings_are_refused(encoding):
    """The message names those that are taken."""
    with pytest.raises(ValueError, match="encoding is one of rgb8, bgr8"):
        images.raw(image(encoding, bytes(64), 8))


def test_too_few_bytes_are_refused():
    """As by every raw frame."""
    with pytest.raises(ValueError, match="need 12 bytes, got 11"):
        images.raw(image("rgb8", bytes(11), 6))


def test_depth_is_no_image():
    """Its file has a header of its own."""
    assert images.compressed(SimpleNamespace(format="rgb8; jpeg compressed bgr8", data=b"x"))
    with pytest.raises(ValueError, match="depth"):
        images.compressed(SimpleNamespace(format="16UC1; compressedDepth png", data=b"x"))


# ---------------------------------------------------------------- cdr
# Bytes of messages, against those of rosbags.

STORE = typestore()
STAMP = FrameStamp("camera_optical", 1_700_000_000_123_456_789, 1)
STAMPED_INFO = ResponseInfo("", "m", "stop", image=ImageInfo("", 640, 480, False), stamp=STAMP)


def array(*labels: str) -> ros2.Detection2DArray:
    """One box for each label."""
    found = tuple(
        Detection(Box(0.1 * n, 0.2, 0.3, 0.4), label, 0.5, f"{n}") for n, label in enumerate(labels)
    )
    return ros2.detections(DetectResult(found, STAMPED_INFO))


@pytest.mark.parametrize("labels", [(), ("cup",), ("a", "red ball", "日本")])
def test_arrays_are_those_of_rosbags(labels):
    """Read by rosbags they have every field, and rosbags writes the same bytes again."""
    expected = array(*labels)
    data = cdr.encode(cdr.DETECTIONS, expected)
    read = STORE.deserialize_cdr(data, cdr.DETECTIONS)
    assert (read.header.stamp.sec, read.header.stamp.nanosec) == (1_700_000_000, 123_456_789)
    assert read.header.frame_id == "camera_optical"
    for each, one in zip(read.detections, expected.detections, strict=True):
        assert each.id == one.id
        assert each.results[0].hypothesis.class_id == one.results[0].hypothesis.class_id
        assert each.results[0].pose.pose.orientation.w == 1
        assert each.bbox.center.position.x == one.bbox.center.position.x
        assert each.bbox.size_y == one.bbox.size_y
    assert STORE.serialize_cdr(read, cdr.DETECTIONS) == data


def test_compressed_images_are_those_of_rosbags():
    """As above."""
    image = SimpleNamespace(header=ros2.header(STAMP), format="jpeg", data=bytes(range(255)))
    data = cdr.encode(cdr.COMPRESSED_IMAGE, image)
    read = STORE.deserialize_cdr(data, cdr.COMPRESSED_IMAGE)
    assert read.format == "jpeg"
    assert np.array_equal(read.data, np.arange(255, dtype=np.uint8))
    assert STORE.serialize_cdr(read, cdr.COMPRESSED_IMAGE) == data
