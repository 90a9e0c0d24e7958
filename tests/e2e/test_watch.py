"""`legato watch`, `legato bag`, `legato run` and the notebook before real servers."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import av
import numpy as np
import pytest
from legato_client import Box, Client, DetectTask
from legato_client.cli import main
from legato_client.cli.settings import ExitCode
from legato_client.stream import outputs
from legato_client.stream.feed import Feed, FeedSettings
from legato_client.stream.frames import CapturedFrame, FrameCounters
from PIL import Image
from pycocotools.coco import COCO

from tests.clients.python.ros import bags
from tests.clients.python.stream.streams import HttpCamera
from tests.e2e.scenes import SIZE, overlap, two_shapes
from tests.e2e.server import ENVIRONMENT, Server, until
from tests.e2e.test_lost_servers import end, started

NULL = ("--model", "null", "--null-objects", "2")
FRAMES = 6


@pytest.fixture
def clip(tmp_path):
    """A second of two shapes that sink."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FRAMES)
        stream.width, stream.height = SIZE
        stream.bit_rate = 8_000_000
        for number in range(FRAMES):
            frame = av.VideoFrame.from_image(two_shapes(4 * number).image)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.fixture
def legato(server, monkeypatch, capsys):
    """Run `legato watch`: the numbers of its session."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)

    def watch(*words):
        assert main(["watch", *map(str, words), "--task", "detect:red circle", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return watch


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_frame_of_a_clip_is_answered(legato, clip, tmp_path):
    """In order, rightly, and drawn at its time."""
    lines, film = tmp_path / "out.jsonl", tmp_path / "out.mp4"
    figures = legato(clip, "--every-frame", "--output", lines, "--output", film)
    assert (figures["taken"], figures["answered"], figures["lost"]) == (FRAMES, FRAMES, 0)
    assert figures["not_drawn"] == 0
    assert [line["frame"] for line in lines_of(lines)] == list(range(FRAMES))
    for number, line in enumerate(lines_of(lines)):
        (circle,) = line["results"]["detect:red circle"]["objects"]
        assert overlap(Box(**circle["box"]), two_shapes(4 * number).boxes["red circle"]) > 0.6
    with av.open(str(film)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert times == pytest.approx([number / FRAMES for number in range(FRAMES)], abs=1e-3)


def test_the_newest_frames_of_a_clip_are_answered(legato, clip, tmp_path):
    """Of more than the server answers; each is accounted for."""
    lines = tmp_path / "out.jsonl"
    figures = legato(clip, "--speed", "20", "--jpeg", "90", "--max-side", "160", "--output", lines)
    sent = figures["answered"] + sum(figures["dropped"].values())
    assert figures["sent"] == sent
    assert sent + figures["replaced"] + figures["refused"] == figures["taken"] == FRAMES
    found = lines_of(lines)
    assert len(found) == figures["answered"]
    assert found[-1]["frame"] == FRAMES - 1
    assert (found[-1]["width"], found[-1]["height"]) == (160, 120)


@pytest.mark.slow
def test_a_stream_outlives_its_server_and_itself(tmp_path):
    """The server is killed, the source is cut off: both are found again, and it goes on.

    At SIGTERM it ends with the numbers of the session.
    """
    lines = tmp_path / "out.jsonl"

    def count():
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    with (
        HttpCamera() as camera,
        started(tmp_path, "one", *NULL) as one,
        started(tmp_path, "two", *NULL) as two,
    ):
        words = ["watch", camera.url, "--server", f"ipv4:{one.address},{two.address}", "--json"]
        words += ["--task", "detect:cup", "--output", str(lines)]
        command = [sys.executable, "-m", "legato_client.cli", *words]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
            until(lambda: count() > 5)
            (busy,) = [each for each in (one, two) if each.load().sessions]
            end(busy)
            before = count()
            until(lambda: count() > before + 5)
            camera.cut_off()
            until(lambda: camera.num_connections == 2)
            before = count()
            until(lambda: count() > before + 5)
            process.terminate()
            said, _ = process.communicate()
    assert process.returncode == 0
    figures = json.loads(said)
    assert (figures["reconnects"], figures["source_reconnects"]) == (1, 1)
    assert figures["age_p95"] is not None
    numbers = [line["frame"] for line in lines_of(lines)]
    assert numbers == sorted(set(numbers))


@pytest.mark.slow
def test_a_restarted_server_is_found_and_reported(tmp_path):
    """On standard error: that it is waited for, and that it is back; then answers come again."""
    lines = tmp_path / "out.jsonl"

    def count():
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    with HttpCamera() as camera, contextlib.ExitStack() as stack:
        one = stack.enter_context(started(tmp_path, "one", *NULL))
        words = ["watch", camera.url, "--server", one.address, "--json"]
        words += ["--task", "detect:cup", "--output", str(lines), "--retry-for", "170"]
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "legato_client.cli", *words],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        until(lambda: count() > 5)
        end(one)
        stack.enter_context(started(tmp_path, "again", *NULL, "--listen", one.address))
        before = count()
        until(lambda: count() > before + 5)
        process.terminate()
        said, notices = process.communicate()
    assert process.returncode == 0
    assert json.loads(said)["reconnects"] == 1
    waiting, back = [json.loads(line)["notice"] for line in notices.splitlines()]
    assert waiting.startswith(f"waiting for the server at {one.address}: lost: ")
    assert back.startswith(f"the server at {one.address} is back after ")


def test_an_age_limit_below_the_response_time_is_reported(clip, tmp_path, capsys):
    """With both times, so that one knows what to change."""
    with started(tmp_path, "one", "--model", "null", "--null-step-ms", "60") as server:
        words = ["watch", clip, "--task", "detect:cup", "--max-age", "0.1", "--speed", "0.2"]
        assert main([*map(str, words), "--server", server.address]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "frames too old" in line]
    counts = re.fullmatch(
        r"(\d+) of \1 frames too old: answers take (\d+\.\d+) s, the age limit is 0\.1 s: "
        "raise --max-age",
        line,
    )
    assert counts is not None, line
    assert float(counts[2]) > 0.1


def fit(marks, truth):
    """The mean overlap of boxes with where things are."""
    return sum(overlap(each.box, truth[each.label]) for each in marks) / len(marks)


def test_tracked_objects_are_shown_where_they_are_now(server, tmp_path):
    """The terminal and the video show the newest frame, with boxes that fit it better.

    Here an answer always comes a frame, 0.5 s, after its own.
    """
    late, begin = 1, time.time_ns() - 10 * 10**9
    scenes = [two_shapes(8 * number - 40) for number in range(10)]
    frames = [
        CapturedFrame(
            number,
            number / 2,
            begin + number * 10**9 // 2,
            scene.file,
            functools.partial(getattr, scene, "image"),
        )
        for number, scene in enumerate(scenes)
    ]
    drawings = outputs.Drawings()
    film = outputs.VideoOutput(tmp_path / "out.mp4", True, drawings)
    fits: list[tuple[float, float]] = []
    has_come = threading.Semaphore(0)

    def compare(answered):
        drawings.newest = frames[min(answered.frame.number + late, len(frames) - 1)]
        film.take(answered)
        drawing = drawings.of(answered)
        if drawing.frame is not answered.frame and drawing.faint:
            truth = scenes[drawing.frame.number].boxes
            fits.append((fit(drawing.marks, truth), fit(drawing.faint, truth)))
        has_come.release()

    tasks = {"red circle": DetectTask("red circle")}
    with Client(server.address) as client:
        settings = FeedSettings(tasks, track=True)
        feed = Feed(client, settings, compare, FrameCounters(), patience=10.0, waits=False)
        drawings.now = feed.now
        thread = threading.Thread(target=feed.run)
        thread.start()
        for frame in frames:
            feed.offer(frame)
            assert has_come.acquire(timeout=60)
        feed.finish()
        thread.join()
    film.close()
    expected, measured = (sum(each) / len(fits) for each in zip(*fits, strict=True))
    assert len(fits) > 5
    assert expected > measured + 0.05
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert len(fits) <= sum(1 for _ in container.decode(video=0)) <= len(frames)


def test_without_a_server_it_ends_at_once(clip, capsys):
    """With the exit code of every command."""
    words = ["watch", str(clip), "--server", "127.0.0.1:1", "--task", "detect:cup"]
    assert main(words) == ExitCode.UNAVAILABLE
    assert "is the server running?" in capsys.readouterr().err


# ---------------------------------------------------------------- bags
# `legato bag` and legato-tiny; rosbags writes the bag and reads the answers.

TOPIC = "/camera/image_raw"


@pytest.fixture
def legato_bag(server, monkeypatch):
    """Run `legato bag`; its exit code."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)
    return lambda *words: main(["bag", *map(str, words)])


def test_a_bag_of_images_becomes_a_bag_of_answers(legato_bag, tmp_path, capsys):
    """With stamps, frames and copies; an image that fails is counted, and changes the exit code."""
    scenes = [two_shapes(4 * n) for n in range(1, 4)]
    messages = [(TOPIC, n, bags.image(n, each.image)) for n, each in enumerate(scenes, 1)]
    messages.insert(1, (TOPIC, 1, bags.image(1, scenes[0].image, encoding="bayer_rggb8")))
    messages.append(("/note", 9, bags.string("hello")))
    path = bags.write(tmp_path / "in", messages)
    out = tmp_path / "out.mcap"
    words = [path, "--image", TOPIC, "--task", "detect:red circle", "--task", "point:blue square"]
    words += ["--output", out, "--copy", "/note", "--draw", "/drawn", "--json"]
    assert legato_bag(*words) == ExitCode.OTHER
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["images"], report["failed"], report["copied"]) == (4, 1, 1)
    assert "bayer_rggb8" in report["problems"][0]
    assert "1 of 4 images failed" in said.err
    read = bags.read(out)
    arrays = [(time, message) for topic, time, message in read if topic == "/legato/detections"]
    assert [(time, array.header.stamp.nanosec) for time, array in arrays] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    for (_, array), scene in zip(arrays, scenes, strict=True):
        circle, square = array.detections
        assert circle.results[0].hypothesis.class_id == "red circle"
        assert overlap(box_of(circle), scene.boxes["red circle"]) > 0.6
        assert (square.results[0].hypothesis.class_id, square.bbox.size_x) == ("blue square", 0)
    drawn = [message for topic, _, message in read if topic == "/drawn"]
    assert len(drawn) == 3
    assert Image.open(io.BytesIO(drawn[0].data.tobytes())).format == "JPEG"
    assert read[-1][2].data == "hello"


def box_of(detection):
    """As a fraction of the image."""
    center, width, height = detection.bbox.center.position, *SIZE
    across, down = detection.bbox.size_x / 2, detection.bbox.size_y / 2
    left, right = (center.x - across) / width, (center.x + across) / width
    return Box(left, (center.y - down) / height, right, (center.y + down) / height)


def test_what_makes_no_sense_is_refused(legato_bag, tmp_path, capsys):
    """Before anything is written; what was there stays."""
    path = bags.write(tmp_path / "in", [(TOPIC, 1, bags.image(1, two_shapes().image))])
    content = path.read_bytes()
    out = tmp_path / "out.mcap"
    for words, message in (
        ((path, "--image", "/no", "--task", "detect:cup", "--output", out), "topics with images"),
        ((path, "--image", TOPIC, "--task", "caption", "--output", out), "boxes and points"),
        ((path, "--image", TOPIC, "--task", "detect:cup", "--output", path), "is the bag itself"),
        ((out, "--image", TOPIC, "--task", "detect:cup", "--output", out), "No such file"),
    ):
        assert legato_bag(*words) != 0
        assert message in capsys.readouterr().err
    assert path.read_bytes() == content
    assert not out.exists()
    asked = [path, "--image", TOPIC, "--task", "detect:cup", "--output", out]
    assert legato_bag(*asked, "--server", "127.0.0.1:1") == ExitCode.UNAVAILABLE
    assert not out.exists()


# ---------------------------------------------------------------- legato run

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
CLIP_FRAMES, CLIP_RATE = 8, 4  # of the video; in a second


@pytest.fixture(scope="module")
def null_server(tmp_path_factory):
    """A server without a model."""
    with Server(
        tmp_path_factory.mktemp("null"), "--model", "null", "--null-objects", "2"
    ) as running:
        yield running
        running.settle()


@pytest.fixture
def folder(tmp_path):
    """Two images, one of them turned by its EXIF data, two bad files, and a video."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    scene = two_shapes()
    (folder / "a.png").write_bytes(scene.file())
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    (folder / "b.jpg").write_bytes(scene.file("JPEG", exif=exif))
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "bad.mp4").write_bytes(b"no video")
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=CLIP_RATE)
        stream.width, stream.height = SIZE
        for number in range(CLIP_FRAMES):
            image = two_shapes(4 * number).image
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return folder


@pytest.fixture
def legato_run(null_server, tmp_path, monkeypatch):
    """Run `legato run` on the folder: its exit code, and its lines by source and frame."""
    monkeypatch.setenv("LEGATO_SERVER", null_server.address)
    output = tmp_path / "out.jsonl"

    def run(*words):
        code = main(["run", *map(str, words), "--output", str(output)])
        lines = [json.loads(line) for line in output.read_text().splitlines()[1:]]
        return code, {(Path(line["source"]).name, line.get("frame")): line for line in lines}

    return run


def test_images_videos_and_bad_files(legato_run, folder, tmp_path, capsys):
    """Every file has its lines, COCO's reader reads the boxes, and drawings lie in their folder."""
    coco, drawn = tmp_path / "coco.json", folder / "drawn"
    words = [folder, "--task", "detect:cup", "--task", "segment:dog", "--every", "3"]
    words += ["--coco", coco, "--annotate", drawn, "--sorted"]
    code, lines = legato_run(*words)
    assert code == 1
    assert list(lines) == [
        ("a.png", None), ("b.jpg", None), ("bad.mp4", None), ("bad.png", None),
        ("clip.mp4", 0), ("clip.mp4", 3), ("clip.mp4", 6),
    ]  # fmt: skip
    assert "2 of 7 images failed" in capsys.readouterr().err
    assert lines["bad.png", None]["error"]["reason"] == "IMAGE_UNDECODABLE"
    assert lines["bad.mp4", None]["error"]["code"] == "UNREADABLE"
    assert [lines["clip.mp4", n]["time"] for n in (0, 3, 6)] == [0, 3 / CLIP_RATE, 6 / CLIP_RATE]
    assert (lines["b.jpg", None]["width"], lines["b.jpg", None]["height"]) == SIZE[::-1]
    _check_coco(COCO(str(coco)), lines)
    assert sorted(path.name for path in drawn.iterdir()) == ["a.png", "b.jpg", "clip.mp4"]
    with Image.open(drawn / "b.jpg") as image:
        assert image.height > image.width
    with av.open(str(drawn / "clip.mp4")) as container:
        frames = [(each.time, each.to_image()) for each in container.decode(video=0)]
    assert [time for time, _ in frames] == pytest.approx(
        [0, 3 / CLIP_RATE, 6 / CLIP_RATE], abs=0.01
    )
    assert all(_has_colour(image) for _, image in frames)


def test_frames_by_time(legato_run, folder):
    """`--fps` takes the first frame of each period, and a slower video whole."""
    _, lines = legato_run(folder / "clip.mp4", "--task", "caption", "--fps", 2, "--sorted")
    assert list(lines) == [("clip.mp4", n) for n in range(0, CLIP_FRAMES, 2)]


def test_drawings_do_not_replace_images(legato_run, folder):
    """Their folder must be another one."""
    before = (folder / "a.png").read_bytes()
    words = (folder / "a.png", "--task", "detect:cup", "--annotate", folder)
    assert legato_run(*words)[0] == 2
    assert (folder / "a.png").read_bytes() == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks(null_server, path, monkeypatch):
    """Each is of the published form and holds no output, and its cells run in their order."""
    monkeypatch.setenv("LEGATO_SERVER", null_server.address)
    import nbformat  # takes seconds, not needed by most

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(cell.source, f"{path.name}, {cell.id}", "exec"), names)
    assert names["lines"]


def _check_coco(coco, lines):
    """Its boxes and masks are where the lines say."""
    answered = [line for line in lines.values() if "error" not in line]
    assert len(coco.imgs) == len(answered) == 5
    assert {each["name"] for each in coco.loadCats(coco.getCatIds())} == {"cup", "dog"}
    for image, line in zip(coco.imgs.values(), answered, strict=True):
        assert (image["file_name"], image.get("frame")) == (line["source"], line.get("frame"))
        (dog,) = coco.getCatIds("dog")
        cups = coco.loadAnns(coco.getAnnIds(image["id"]))
        boxes = [each["bbox"] for each in cups if each["category_id"] != dog]
        found = [each["box_pixels"] for each in line["results"]["detect:cup"]["objects"]]
        assert [[x, y, x + w, y + h] for x, y, w, h in boxes] == found
        for each in coco.loadAnns(coco.getAnnIds(image["id"], dog)):
            mask = coco.annToMask(each)
            assert mask.shape == (line["height"], line["width"])
            left, top, width, height = map(round, each["bbox"])
            assert mask[top : top + height, left : left + width].sum() == mask.sum() > 0


def _has_colour(image: Image.Image) -> bool:
    """Whether a mark was drawn: the scene itself has no such blue."""
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)
    return bool(((blue > 215) & (green > 120) & (red < 60)).any())
