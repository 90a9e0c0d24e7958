"""What the README shows works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from legato_client.cli import main
from PIL import Image

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [
    line
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
    if re.match(r"legato (detect|point|segment|caption|query|info)", line)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the image that the README speaks of."""
    Image.new("RGB", (200, 100), "white").save(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("program", [text for kind, text in BLOCKS if kind == "python"])
def test_python(program, folder, server):
    """Each Python example runs against a server."""
    exec(compile(program.replace("127.0.0.1:50051", server.target), "README.md", "exec"), {})
    assert server.requests or server.sessions.conversations


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, folder, server, monkeypatch):
    """Each command of the README runs against a server with exit code 0."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)
    assert main(shlex.split(command)[1:]) == 0
    assert server.requests


def test_examples_are_found():
    """The patterns above still find the README's examples."""
    assert len(COMMANDS) >= 6
    assert sum(kind == "python" for kind, _ in BLOCKS) >= 2
