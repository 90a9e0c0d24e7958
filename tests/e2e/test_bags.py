"""`legato bag` and a server without a model; rosbags writes the bag and reads the answers."""

from __future__ import annotations

import io
import json

import pytest
from legato_client.cli import main
from legato_client.cli.exits import ExitCode
from PIL import Image

from tests.clients.python.ros import bags
from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server

TOPIC = "/camera/image_raw"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without a model."""
    folder = tmp_path_factory.mktemp("null")
    with Server(folder, "--model", "null", "--null-objects", "2") as running:
        yield running
        running.settle()


@pytest.fixture
def legato(server, monkeypatch):
    """Run `legato bag`; its exit code."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)
    return lambda *words: main(["bag", *map(str, words)])


def test_a_bag_of_images_becomes_a_bag_of_answers(legato, tmp_path, capsys):
    """With stamps, frames and copies; an image that fails is counted, and changes the exit code."""
    picture = two_shapes().image
    messages = [(TOPIC, n, bags.image(n, picture)) for n in range(1, 6)]
    messages.insert(2, (TOPIC, 2, bags.image(2, picture, encoding="bayer_rggb8")))
    messages.append(("/note", 9, bags.string("hello")))
    path = bags.write(tmp_path / "in", messages)
    out = tmp_path / "out.mcap"
    words = [path, "--topic", TOPIC, "--task", "detect:red circle", "--task", "point:cup"]
    words += ["--out", out, "--copy", "/note", "--draw", "/drawn", "--json"]
    assert legato(*words) == ExitCode.OTHER
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["images"], report["failed"], report["copied"]) == (6, 1, 1)
    assert report["detections"] == 5 * 4
    assert "bayer_rggb8" in report["problems"][0]
    assert "1 of 6 images failed" in said.err
    read = bags.read(out)
    arrays = [(time, message) for topic, time, message in read if topic == "/legato/detections"]
    assert [(time, array.header.stamp.nanosec) for time, array in arrays] == [
        (n, n) for n in range(1, 6)
    ]
    labels = [each.results[0].hypothesis.class_id for each in arrays[0][1].detections]
    assert labels == ["red circle", "red circle", "cup", "cup"]
    drawn = [message for topic, _, message in read if topic == "/drawn"]
    assert len(drawn) == 5
    assert Image.open(io.BytesIO(drawn[0].data.tobytes())).format == "JPEG"
    assert read[-1][2].data == "hello"


def test_what_makes_no_sense_is_refused(legato, tmp_path, capsys):
    """Before anything is written; what was there stays."""
    path = bags.write(tmp_path / "in", [(TOPIC, 1, bags.image(1, two_shapes().image))])
    content = path.read_bytes()
    out = tmp_path / "out.mcap"
    for words, message in (
        ((path, "--topic", "/no", "--task", "detect:cup", "--out", out), "topics with images"),
        ((path, "--topic", TOPIC, "--task", "caption", "--out", out), "boxes and points"),
        ((path, "--topic", TOPIC, "--task", "detect:cup", "--out", path), "is the bag itself"),
        ((out, "--topic", TOPIC, "--task", "detect:cup", "--out", out), "No such file"),
    ):
        assert legato(*words) != 0
        assert message in capsys.readouterr().err
    assert path.read_bytes() == content
    assert not out.exists()
    words = (
        path,
        "--topic",
        TOPIC,
        "--task",
        "detect:cup",
        "--out",
        out,
        "--server",
        "127.0.0.1:1",
    )
    assert legato(*words) == ExitCode.UNAVAILABLE
    assert not out.exists()
