"""Images of files and of streams that are lost and come back."""

from __future__ import annotations

import itertools
import threading
import time

import av
import pytest
from legato_client import RawFrame
from legato_client.stream.camera import Camera, FrameEncoding, parse_source
from legato_client.stream.frames import CapturedFrame, FrameCounters, Mailbox
from PIL import Image

from tests.clients.python.live import streams
from tests.clients.python.until import until

FRAMES = 10


@pytest.fixture
def clip(tmp_path):
    """A file of ten images at 25 a second."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = streams.add_stream(container, "mpeg4")
        for number in range(FRAMES):
            container.mux(streams.encoded(stream, number))
        container.mux(stream.encode())
    return path


def played(
    name: str, *, encoding: FrameEncoding | None = None, rate: float = 1.0
) -> list[CapturedFrame]:
    """What a camera gives until it ends."""
    frames: list[CapturedFrame] = []
    camera = Camera(
        parse_source(name),
        frames.append,
        FrameCounters(),
        encoding=encoding or FrameEncoding(),
        rate=rate,
        patience=None,
    )
    camera.run()
    return frames


def test_a_file_is_played_at_its_own_pace(clip):
    """Each image is given when it is due, no earlier, and captured then."""
    given = []
    camera = Camera(
        parse_source(str(clip)),
        lambda frame: given.append((frame, time.time_ns())),
        FrameCounters(),
        encoding=FrameEncoding(),
        rate=2.0,
        patience=None,
    )
    camera.run()
    assert [frame.number for frame, _ in given] == list(range(FRAMES))
    assert [frame.time for frame, _ in given] == pytest.approx([n / 25 for n in range(FRAMES)])
    first = given[0][0].captured_ns
    for frame, at in given:
        assert at >= frame.captured_ns
        assert frame.captured_ns - first >= round(frame.time / 2 * 1e9) - 1


def test_images_are_sent_as_asked(clip):
    """Without loss, shrunk, or as JPEG."""
    (raw, *_), (small, *_), (jpeg, *_) = (
        played(str(clip), encoding=encoding, rate=100.0)
        for encoding in (FrameEncoding(), FrameEncoding(max_side=32), FrameEncoding(jpeg=80))
    )
    assert isinstance(frame := raw.read(), RawFrame)
    assert (frame.width, frame.height, frame.format) == (64, 48, "rgb8")
    assert raw.image().size == streams.SIZE
    assert raw.frame_id == "clip.mp4"
    assert isinstance(shrunk := small.read(), RawFrame)
    assert (shrunk.width, shrunk.height) == (32, 24)
    assert isinstance(file := jpeg.read(), bytes)
    assert file.startswith(b"\xff\xd8")


@pytest.mark.parametrize("content", [b"", b"no video at all"])
def test_a_file_that_is_no_video_is_an_error(tmp_path, content):
    """It names the file."""
    path = tmp_path / "bad.mp4"
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"bad\.mp4"):
        played(str(path))


@pytest.mark.parametrize("kind", [streams.HttpCamera, streams.RtspCamera])
def test_a_stream_that_is_lost_is_opened_again(kind):
    """Its images go on, with times and numbers that grow, and it is counted."""
    counters, mailbox = FrameCounters(), Mailbox(every=False)
    frames = []

    def give(frame):
        frames.append(frame)
        mailbox.put(frame)

    with kind() as served:
        camera = Camera(
            parse_source(served.url), give, counters, encoding=FrameEncoding(), patience=30
        )
        thread = threading.Thread(target=camera.run)
        thread.start()
        until(lambda: len(frames) > 10)
        served.cut_off()
        until(lambda: counters.totals().source_reconnects)
        seen = len(frames)
        until(lambda: len(frames) > seen + 10)
        assert counters.source == "running"
        camera.stop()
        thread.join()
    assert served.num_connections == 2
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert all(one.time <= other.time for one, other in itertools.pairwise(frames))
    assert all(one.captured_ns < time.time_ns() for one in frames)
    red, green, _ = frames[-1].image().getpixel((5, 5))
    assert abs(green - 90) < 20
    assert red >= 30


def test_a_stream_that_stays_away_ends_it():
    """Once patience has ended, with what was wrong."""
    with streams.HttpCamera() as served:
        counters = FrameCounters()
        camera = Camera(
            parse_source(served.url),
            lambda _: None,
            counters,
            encoding=FrameEncoding(),
            patience=0.1,
        )
        thread_problem = []

        def run():
            try:
                camera.run()
            except OSError as error:
                thread_problem.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: counters.source == "running")
    thread.join()
    assert thread_problem
    assert counters.source.startswith("lost")


def test_a_stream_that_never_was_is_an_error_without_its_password():
    """At once, whatever the patience."""
    with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
        played("rtsp://robot:secret@127.0.0.1:1/live")
    assert "secret" not in str(caught.value)


def test_devices_are_opened_by_v4l2():
    """With the size and rate that are asked for; whether one opens is for a computer with one."""
    source = parse_source("/dev/video3", size="640x480", fps=30.0)
    assert (source.container, source.is_file) == ("v4l2", False)
    assert source.options == {"video_size": "640x480", "framerate": "30"}


def test_turned_images_keep_their_shape():
    """A smaller side is in proportion."""
    shown = FrameEncoding(max_side=10).encode(Image.new("RGB", (40, 20)))
    assert isinstance(shown, RawFrame)
    assert shown.height == 5
