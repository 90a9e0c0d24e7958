"""A running fake server for each test that asks for one, and both faces of the client.

`legato` and `run` call the command against that server in this process.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from legato_client.batch.output import Line
from legato_client.cli import main
from PIL import Image

from tests.clients.python.face import Face, session_of
from tests.clients.python.fake_server import FakeServer


@pytest.fixture
def server():
    """A scripted server."""
    with FakeServer() as fake:
        yield fake


@pytest.fixture(params=["sync", "async"])
def client(request, server):
    """Either face, connected to the scripted server."""
    return Face(request.param, server.target, 20.0)


@pytest.fixture(params=["sync", "async"])
def connect(request, server):
    """Opens a session of either face; whatever it did, it did by the contract."""
    yield functools.partial(session_of, request.param, server.target)
    assert not [each.violations for each in server.sessions.conversations if each.violations]


# ---------------------------------------------------------------- command


@pytest.fixture
def image(tmp_path):
    """An image file."""
    path = tmp_path / "a.png"
    Image.new("RGB", (200, 100), "white").save(path)
    return str(path)


@pytest.fixture
def legato(server, monkeypatch, capsys):
    """Run `legato` against the scripted server: exit code, standard output, standard error."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def read(path: Path) -> list[Line]:
    """The lines of images."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.fixture
def folder(tmp_path):
    """Twelve files that the scripted server takes for images."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.png").write_bytes(b"image %d" % number)
    return folder


@pytest.fixture
def run(server, tmp_path, monkeypatch, capsys):
    """Run `legato run` into out.jsonl: exit code, lines, standard output, standard error."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)
    output = tmp_path / "out.jsonl"

    def call(*words: object, task: str = "detect:cat") -> tuple[int, list[Line], str, str]:
        code = main(["run", *map(str, words), "--task", task, "--output", str(output)])
        out, err = capsys.readouterr()
        return code, read(output) if output.exists() else [], out, err

    return call
