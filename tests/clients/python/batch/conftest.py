"""`legato run` in this process, against the scripted server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from legato_client.batch.output import Line
from legato_client.cli import main


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
