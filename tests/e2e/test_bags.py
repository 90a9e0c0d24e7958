"""`legato bag` and legato-tiny; rosbags writes the bag and reads the answers."""

from __future__ import annotations

import io
import json

import pytest
from legato_client import Box
from legato_client.cli import main
from legato_client.cli.settings import ExitCode
from PIL import Image

from tests.clients.python.ros import bags
from tests.e2e.scenes import SIZE, overlap, two_shapes

TOPIC = "/camera/image_raw"


@pytest.fixture
def legato(server, monkeypatch):
    """Run `legato bag`; its exit code."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)
    return lambda *words: main(["bag", *map(str, words)])


def test_a_bag_of_images_becomes_a_bag_of_answers(legato, tmp_path, capsys):
    """With stamps, frames and copies; an image that fails is counted, and changes the exit code."""
    scenes = [two_shapes(4 * n) for n in range(1, 4)]
    messages = [(TOPIC, n, bags.image(n, each.image)) for n, each in enumerate(scenes, 1)]
    messages.insert(1, (TOPIC, 1, bags.image(1, scenes[0].image, encoding="bayer_rggb8")))
    messages.append(("/note", 9, bags.string("hello")))
    path = bags.write(tmp_path / "in", messages)
    out = tmp_path / "out.mcap"
    words = [path, "--image", TOPIC, "--task", "detect:red circle", "--task", "point:blue square"]
    words += ["--output", out, "--copy", "/note", "--draw", "/drawn", "--json"]
    assert legato(*words) == ExitCode.OTHER
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


def test_what_makes_no_sense_is_refused(legato, tmp_path, capsys):
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
        assert legato(*words) != 0
        assert message in capsys.readouterr().err
    assert path.read_bytes() == content
    assert not out.exists()
    asked = [path, "--image", TOPIC, "--task", "detect:cup", "--output", out]
    assert legato(*asked, "--server", "127.0.0.1:1") == ExitCode.UNAVAILABLE
    assert not out.exists()
