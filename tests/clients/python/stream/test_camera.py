"""Images of files and streams, and what is written and shown of their answers."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time

import av
import pytest
from legato_client import Box, Detection, DetectResult, RawFrame, Unavailable
from legato_client._types.results import ImageInfo, ResponseInfo
from legato_client.cli.half_blocks import HalfBlocks
from legato_client.cli.terminal import Terminal
from legato_client.cli.watch import LiveView, rows_of
from legato_client.stream import outputs
from legato_client.stream.camera import Camera, FrameEncoding, parse_source
from legato_client.stream.feed import AnsweredFrame
from legato_client.stream.frames import CapturedFrame, FrameCounters, Mailbox
from legato_client.stream.outputs import BackgroundWorker
from PIL import Image
from rich.console import Console

from tests.clients.python.face import until
from tests.clients.python.stream import streams

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


# ---------------------------------------------------------------- outputs
# What is written and shown of answered images.

SIZE = (320, 240)
IMAGE = ImageInfo("", *SIZE, False)
CUP = Detection(Box(0.25, 0.25, 0.75, 0.75), "cup", 0.875, "7")


def drawing(number: int) -> outputs.Drawing:
    """What is drawn of an answer."""
    return outputs.Drawings().of(answered(number))


def answered(
    number: int = 0, *, time: float | None = None, size: tuple[int, int] = SIZE
) -> AnsweredFrame:
    """A grey image with a cup, of one task that failed and one that did not."""
    at = number / 10 if time is None else time
    image = Image.new("RGB", size, (90, 90, 90))
    frame = CapturedFrame(number, at, 5_000_000_000, lambda: b"", lambda: image)
    found = DetectResult((CUP,), ResponseInfo("", "m", "stop", image=IMAGE))
    return AnsweredFrame(
        frame, {"detect:cup": found, "point:dog": Unavailable("gone")}, IMAGE, 0.125
    )


def test_a_line_has_results_time_and_age():
    """In the form of `legato run`; the reader of a pipe has it at once."""
    file = io.BytesIO()
    outputs.JsonLinesOutput(file, "clip.mp4").take(answered(3))
    line = json.loads(file.getvalue())
    assert (line["source"], line["frame"], line["captured"], line["age"]) == (
        "clip.mp4", 3, 5.0, 0.125,
    )  # fmt: skip
    (cup,) = line["results"]["detect:cup"]["objects"]
    assert (cup["box_pixels"], cup["confidence"], cup["track_id"]) == (
        [80, 60, 240, 180],
        0.875,
        "7",
    )
    assert line["results"]["point:dog"]["error"]["message"] == "gone"


@pytest.mark.parametrize("size", [(360, 640), (900, 300)])
def test_a_film_has_the_shape_of_its_images(tmp_path, size):
    """Whatever it is."""
    film = outputs.VideoOutput(tmp_path / "out.mp4", every=True, drawings=outputs.Drawings())
    film.take(answered(0, size=size))
    film.close()
    with av.open(str(tmp_path / "out.mp4")) as container:
        (frame,) = container.decode(video=0)
    assert (frame.width, frame.height) == size


def test_a_film_has_each_image_at_its_time(tmp_path):
    """With its marks; of another size it is fitted, and one that comes late is left out."""
    film = outputs.VideoOutput(tmp_path / "out.mp4", every=True, drawings=outputs.Drawings())
    for each in (answered(0), answered(1), answered(9, time=0.05), answered(2, size=(160, 120))):
        film.take(each)
    film.close()
    with av.open(str(tmp_path / "out.mp4")) as container:
        frames = list(container.decode(video=0))
    assert [round(float(each.time), 2) for each in frames] == [0, 0.1, 0.2]
    assert len({(each.width, each.height) for each in frames}) == 1
    assert len(frames[0].to_image().getcolors(1 << 20)) > 10


@pytest.mark.parametrize("name", ["out.avi", "out", "lines.json"])
def test_another_ending_is_refused(name):
    """The message says which there are."""
    with pytest.raises(ValueError, match=r"ends in \.jsonl or \.mp4"):
        outputs.open_output(name, "clip", False, io.BytesIO, outputs.Drawings())


def test_slow_work_does_not_delay_answers():
    """The oldest of what waits is left out, and counted."""
    go = threading.Event()
    taken = []

    def slow(each):
        assert go.wait(20)
        taken.append(each.frame.number)

    worker = BackgroundWorker(slow, every=False)
    for number in range(20):
        worker.submit(drawing(number))
    go.set()
    worker.close()
    assert len(taken) + worker.num_dropped == 20
    assert taken[-8:] == list(range(12, 20))


def test_slow_work_on_every_image_takes_them_all():
    """In order."""
    taken = []
    worker = BackgroundWorker(lambda each: taken.append(each.frame.number), every=True)
    for number in range(50):
        worker.submit(drawing(number))
    worker.close()
    assert taken == list(range(50))


def test_a_failure_of_slow_work_is_told():
    """By the next call, and by the end."""

    def full(each):
        raise OSError(28, "No space left on device")

    worker = BackgroundWorker(full, every=True)
    with pytest.raises(OSError, match="No space"):
        fill(worker)
    with pytest.raises(OSError, match="No space"):
        worker.close()


def fill(worker: BackgroundWorker) -> None:
    for number in range(99):
        worker.submit(drawing(number))


def test_rows_say_what_where_how_sure_and_which():
    """A task that failed has a row too."""
    assert rows_of(answered()) == [
        ("detect:cup", "cup", "80, 60 to 240, 180", "0.88", "7"),
        ("point:dog", "failed: gone [UNAVAILABLE]", "", "", ""),
    ]


def test_a_image_fits_its_characters():
    """Each character is two pixels, and boxes are drawn in their colours."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=80)
    console.print(HalfBlocks(Image.new("RGB", SIZE, (1, 2, 3)), [CUP], 40, 10))
    text = out.getvalue()
    lines = text.splitlines()
    assert len(lines) == 10
    assert all(line.count("▀") == 27 for line in lines)
    assert "38;2;1;2;3" in text
    assert "38;2;0;158;255" in text


def test_a_large_terminal_shows_image_and_table(monkeypatch):
    """And how it goes, in a line below."""
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "40")
    out = TerminalFile()
    terminal = Terminal(False, out)
    with terminal.live() as live:
        view = LiveView(terminal, FrameCounters(), "clip.mp4", outputs.Drawings(), live)
        view.take(answered())
        view.refresh()
    text = out.getvalue()
    assert "▀" in text
    for word in ("cup", "0.88", "80, 60 to 240, 180", "failed: gone", "clip.mp4: source opening"):
        assert word in text


def test_a_small_terminal_shows_the_table_only(monkeypatch):
    """There is no room for an image."""
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "12")
    out = TerminalFile()
    terminal = Terminal(False, out)
    with terminal.live() as live:
        view = LiveView(terminal, FrameCounters(), "clip.mp4", outputs.Drawings(), live)
        view.take(answered())
        view.refresh()
    assert "▀" not in out.getvalue()
    assert "cup" in out.getvalue()


class TerminalFile(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True
