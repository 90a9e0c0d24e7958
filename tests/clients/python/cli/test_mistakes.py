"""What people type wrong, and what they are told."""

from __future__ import annotations

import pytest
from legato_client import Client, Unavailable
from legato_client._grpc.channel import full_target
from legato_client.cli import main
from legato_client.cli.hints import hint_of
from PIL import Image


@pytest.fixture
def image(tmp_path):
    """An image file."""
    path = tmp_path / "a.png"
    Image.new("RGB", (200, 100), "white").save(path)
    return str(path)


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("robot", "robot:50051"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("dns:50051", "dns:50051"),
        ("unix:/run/legato.sock", "unix:/run/legato.sock"),
        ("dns:///robot:7", "dns:///robot:7"),
        ("ipv4:10.0.0.1:7,10.0.0.2:7", "ipv4:10.0.0.1:7,10.0.0.2:7"),
    ],
)
def test_targets(typed, target):
    """A host without a port is asked at Legato's, not at gRPC's 443."""
    assert full_target(typed) == target


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("http://127.0.0.1:7", "no URL: '127.0.0.1:7' instead of 'http://127.0.0.1:7'"),
        ("https://robot/", "no URL: 'robot'"),
        ("robot:", "HOST:PORT, not 'robot:'"),
        ("robot:fast", "HOST:PORT, not 'robot:fast'"),
        ("robot:70000", "HOST:PORT"),
        (":7", "HOST:PORT"),
    ],
)
def test_targets_that_are_none(typed, problem, capsys, monkeypatch):
    """They are refused by name: by the client, by the flag and in the environment."""
    with pytest.raises(ValueError, match="a server is HOST:PORT"):
        Client(typed)
    assert main(["info", "--server", typed]) == 2
    assert problem in capsys.readouterr().err
    monkeypatch.setenv("LEGATO_SERVER", typed)
    assert main(["info"]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "LEGATO_SERVER" in said


@pytest.mark.parametrize(
    ("name", "form"), [("a.png", "PNG"), ("a.JPG", "JPEG"), ("a.jpeg", "JPEG"), ("a.webp", "WEBP")]
)
def test_the_name_of_a_image_tells_its_form(name, form, image, server, tmp_path):
    """The file holds what its name says."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 0
    with Image.open(target) as drawn:
        assert drawn.format == form


@pytest.mark.parametrize("name", ["found.txt", "found", "found.gif"])
def test_a_name_of_no_image(name, image, server, tmp_path, capsys):
    """It is refused before the server is asked, and nothing is written."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 2
    assert ".png, .jpg, .jpeg, .webp" in capsys.readouterr().err
    assert not target.exists()
    assert not server.requests


def test_a_word_too_many(image, capsys):
    """The help that is named is that of the command."""
    assert main(["detect", image, "a", "b"]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: b" in said
    assert "legato detect --help" in said
    assert main(["token", "new", "--who"]) == 2
    assert "legato token new --help" in capsys.readouterr().err


def test_an_unknown_model(capsys):
    """The models that users know are told, before anything is loaded."""
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--model", "moondream-2"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "no model is called 'moondream-2', but 'moondream2' is" in said
    assert "legato-tiny, moondream2" in said
    assert "random-tiny" not in said
    assert len(said.splitlines()) == 1


def test_load_is_a_command_of_its_own(capsys):
    """`bench` measures this machine only."""
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--serve"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit):
        main(["load", "--help"])
    assert "Load on a running server" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_is_named_where_no_server_answers(name, monkeypatch):
    """A server that cannot be reached may be behind a proxy that cannot."""
    for each in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(each, raising=False)
    assert "no_proxy" not in hint_of(Unavailable("no"))
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert f"through {name}; see no_proxy" in hint_of(Unavailable("no"))
