"""The examples of README.md and of the quickstarts run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from legato_client.cli import main
from PIL import Image

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("quickstart-*.md")))
BLOCKS = [
    (page.name, kind, text)
    for page in PAGES
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
]
SECURED = "robots.example"  # tests/e2e/test_security.py has such a server
PROGRAMS = [(page, text) for page, kind, text in BLOCKS if kind == "python" and SECURED not in text]
COMMANDS = [
    (page, line)
    for page, kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
    if re.match(r"legato (detect|point|segment|caption|query|info)", line) and SECURED not in line
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the image that the examples name."""
    Image.new("RGB", (200, 100), "white").save(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_python(page, program, folder, server):
    """Each Python example runs against a server."""
    exec(compile(program.replace("127.0.0.1:50051", server.target), page, "exec"), {})
    assert server.requests or server.sessions.conversations


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands(page, command, folder, server, monkeypatch):
    """Each command of these pages runs against a server with exit code 0."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)
    assert main(shlex.split(command)[1:]) == 0, page
    assert server.requests


def test_examples_are_found():
    """The patterns above find the examples of README.md and of the quickstarts."""
    shell = [command for page, command in COMMANDS if page == "quickstart-shell.md"]
    assert len(shell) >= 6
    assert sum(page == "README.md" for page, _ in COMMANDS) >= 2
    assert sum(page == "README.md" for page, _ in PROGRAMS) >= 2
    for page in ("quickstart-python.md", "quickstart-robot.md"):
        assert page in dict(PROGRAMS)
