"""The command against a scripted server."""

from __future__ import annotations

import pytest
from legato_client.cli import main
from PIL import Image


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
