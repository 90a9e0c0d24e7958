"""The demo, against a real process that gives scripted answers."""

from __future__ import annotations

import json
import sys

import pytest
from legato_client.cli import main
from legato_client.cli.demo import script_for
from PIL import Image

from tests.clients.python.cli.stand_in import stand_in_service


@pytest.fixture
def scene(tmp_path):
    """An image with a script beside it."""
    Image.new("RGB", (200, 100), "white").save(tmp_path / "scene.png")
    script = {
        "caption_length": "normal",
        "detect": ["cat", "dog"],
        "point": "nose",
        "segment": "cat",
        "query": "how many?",
    }
    (tmp_path / "scene.json").write_text(json.dumps(script))
    return tmp_path / "scene.png"


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Puts the stand-in service where `python -m legato_service` finds it."""
    stand_in_service(tmp_path, "from tests.clients.python.cli import fake_service")
    path = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    monkeypatch.setenv("PYTHONPATH", path)
    return lambda behaviour: monkeypatch.setenv("FAKE_SERVICE", behaviour)


def test_demo(scene, service, tmp_path, capsys):
    """The demo shows every answer, saves the image, and its server ends well."""
    service("ok")
    target = tmp_path / "demo.png"
    assert main(["demo", "--image", str(scene), "--output", str(target)]) == 0
    out = capsys.readouterr().out
    for shown in ("a cat", "box     cat", "detect dog", "point   nose", "outline 1", "two cats"):
        assert shown in out
    with Image.open(target) as drawn:
        assert drawn.getcolors(1) is None, "only one colour"


def test_server_that_does_not_start(scene, service, capsys):
    """A server that ends while starting fails the demo and shows the end of its log.

    Options after `--` reach the server.
    """
    service("crash")
    assert main(["demo", "--image", str(scene), "--", "--device", "abacus"]) == 4
    err = capsys.readouterr().err
    assert "exit code 3" in err
    assert "no weights here for abacus" in err


def test_server_that_does_not_stop_well(scene, service, tmp_path, capsys):
    """A server whose exit code is not 0 fails the demo."""
    service("bad-exit")
    assert main(["demo", "--image", str(scene), "--output", str(tmp_path / "d.png")]) == 1
    assert "exit code 5" in capsys.readouterr().err


def test_missing_image(service, tmp_path, capsys):
    """An image that is not there is a usage error, before any server starts."""
    service("ok")
    assert main(["demo", "--image", str(tmp_path / "none.png")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_script(scene):
    """The script beside an image says what is asked, in order; flags replace its parts."""
    script = script_for(scene)
    titles = [title for title, _ in script.tasks()]
    assert titles == [
        "caption", "detect cat", "detect dog", "point nose", "segment cat", "query how many?"
    ]  # fmt: skip
    changed = script.with_changes(detect=["owl"], point="", segment=None, query=None)
    assert [title for title, _ in changed.tasks()][1:3] == ["detect owl", "segment cat"]


def test_image_without_a_script(tmp_path):
    """Any other image gets a caption."""
    assert [title for title, _ in script_for(tmp_path / "x.jpg").tasks()] == ["caption"]


def test_broken_script(scene, capsys):
    """A script that is not one is a clear failure."""
    scene.with_suffix(".json").write_text("[]")
    assert main(["demo", "--image", str(scene)]) == 1
    assert "is not a demo script" in capsys.readouterr().err
