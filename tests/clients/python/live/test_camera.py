"""Pictures of files and of streams that are lost and come back."""

from __future__ import annotations

import itertools
import threading
import time

import av
import pytest
from legato_client import RawFrame
from legato_client.stream.camera import Camera, Form, source_of
from legato_client.stream.frames import Figures, Mailbox, Shot
from PIL import Image

from tests.clients.python.live import streams
from tests.clients.python.until import until

FRAMES = 10


@pytest.fixture
def clip(tmp_path):
    """A file of ten pictures at 25 a second."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = streams.add_stream(container, "mpeg4")
        for number in range(FRAMES):
            container.mux(streams.encoded(stream, number))
        container.mux(stream.encode())
    return path


def played(name: str, *, form: Form | None = None, rate: float = 1.0) -> list[Shot]:
    """What a camera gives until it ends."""
    shots: list[Shot] = []
    camera = Camera(
        source_of(name), shots.append, Figures(), form=form or Form(), rate=rate, patience=None
    )
    camera.run()
    return shots


def test_a_file_is_played_at_its_own_pace(clip):
    """Each picture is given when it is due, no earlier, and captured then."""
    given = []
    camera = Camera(
        source_of(str(clip)),
        lambda shot: given.append((shot, time.time_ns())),
        Figures(),
        form=Form(),
        rate=2.0,
        patience=None,
    )
    camera.run()
    assert [shot.number for shot, _ in given] == list(range(FRAMES))
    assert [shot.time for shot, _ in given] == pytest.approx([n / 25 for n in range(FRAMES)])
    first = given[0][0].captured_ns
    for shot, at in given:
        assert at >= shot.captured_ns
        assert shot.captured_ns - first >= round(shot.time / 2 * 1e9) - 1


def test_pictures_are_sent_as_asked(clip):
    """Without loss, shrunk, or as JPEG."""
    (raw, *_), (small, *_), (jpeg, *_) = (
        played(str(clip), form=form, rate=100.0)
        for form in (Form(), Form(max_side=32), Form(jpeg=80))
    )
    assert isinstance(frame := raw.read(), RawFrame)
    assert (frame.width, frame.height, frame.format) == (64, 48, "rgb8")
    assert raw.picture().size == streams.SIZE
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
    """Its pictures go on, with times and numbers that grow, and it is counted."""
    figures, mailbox = Figures(), Mailbox(every=False)
    shots = []

    def give(shot):
        shots.append(shot)
        mailbox.put(shot)

    with kind() as served:
        camera = Camera(source_of(served.url), give, figures, form=Form(), patience=30)
        thread = threading.Thread(target=camera.run)
        thread.start()
        until(lambda: len(shots) > 10)
        served.cut_off()
        until(lambda: figures.totals().source_reconnects)
        seen = len(shots)
        until(lambda: len(shots) > seen + 10)
        assert figures.source == "running"
        camera.stop()
        thread.join()
    assert served.num_connections == 2
    assert [shot.number for shot in shots] == list(range(len(shots)))
    assert all(one.time <= other.time for one, other in itertools.pairwise(shots))
    assert all(one.captured_ns < time.time_ns() for one in shots)
    red, green, _ = shots[-1].picture().getpixel((5, 5))
    assert abs(green - 90) < 20
    assert red >= 30


def test_a_stream_that_stays_away_ends_it():
    """Once patience has ended, with what was wrong."""
    with streams.HttpCamera() as served:
        figures = Figures()
        camera = Camera(source_of(served.url), lambda _: None, figures, form=Form(), patience=0.1)
        thread_problem = []

        def run():
            try:
                camera.run()
            except OSError as error:
                thread_problem.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: figures.source == "running")
    thread.join()
    assert thread_problem
    assert figures.source.startswith("lost")


def test_a_stream_that_never_was_is_an_error_without_its_password():
    """At once, whatever the patience."""
    with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
        played("rtsp://robot:secret@127.0.0.1:1/live")
    assert "secret" not in str(caught.value)


def test_devices_are_opened_by_v4l2():
    """With the size and rate that are asked for; whether one opens is for a computer with one."""
    source = source_of("/dev/video3", size="640x480", fps=30.0)
    assert (source.container, source.is_file) == ("v4l2", False)
    assert source.options == {"video_size": "640x480", "framerate": "30"}


def test_turned_pictures_keep_their_shape():
    """A smaller side is in proportion."""
    shown = Form(max_side=10).of(Image.new("RGB", (40, 20)))
    assert isinstance(shown, RawFrame)
    assert shown.height == 5
