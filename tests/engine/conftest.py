"""What the engine's tests share."""

import os
import pathlib

import legato_engine
import pytest


@pytest.fixture
def child_python_path(monkeypatch):
    """Child processes import the same `legato_engine` as the tests do."""
    folder = pathlib.Path(legato_engine.__file__).parents[1]
    paths = [str(folder), str(folder / "tiny")]
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":")
    )
