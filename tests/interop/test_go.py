"""The Go client: its own tests, and its examples, against a real server."""

from __future__ import annotations

import importlib.resources
import json
import subprocess

import pytest

from tests.conformance import programs
from tests.e2e.server import Server

STREET = str(importlib.resources.files("legato_tiny") / "samples" / "street.jpg")

# The first build on a machine takes longer than a test may.
pytestmark = pytest.mark.timeout(2 * programs.PATIENCE)


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Go and what the client depends on."""
    try:
        programs.fetch_go_modules()
    except programs.Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without a model: what it answers does not matter here."""
    with Server(tmp_path_factory.mktemp("go"), "--model", "null") as running:
        yield running
        running.settle()


def go(*words: str, **environment: str) -> str:
    """The output of a go command in the client's folder, which must succeed."""
    done = subprocess.run(
        ["go", *words],
        cwd=programs.GO,
        env={**programs.ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=programs.PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_vet():
    """Everything compiles, tests and examples included, and go vet has nothing to say."""
    go("vet", "./...")


def test_format():
    """Every file is as gofmt writes it."""
    assert not programs.run("gofmt", "-l", ".", cwd=programs.GO)


def test_tests(server):
    """`go test` passes, and leaves nothing out."""
    output = go("test", "-json", "-count=1", "./...", LEGATO_SERVER=server.address)
    events = [json.loads(line) for line in output.splitlines()]
    ended = {event["Test"]: event["Action"] for event in events if "Test" in event}
    assert set(ended.values()) == {"pass"}, ended
    assert "TestSessions" in ended


@pytest.mark.parametrize(
    ("example", "arguments"),
    [("detect", [STREET, "bus"]), ("stream", [STREET]), ("session", ["bus", STREET, STREET])],
)
def test_examples(server, example, arguments):
    """The examples print what they found."""
    assert go("run", f"./examples/{example}", "-server", server.address, *arguments)
