"""The Go client: its own tests, and its examples, against a real server."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import signal
import subprocess

import pytest

from tests.conformance import programs
from tests.e2e.server import Server

README = programs.GO / "README.md"
PREAMBLE = """package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/legato-vlm/legato/clients/go/legato"
)

var frames chan []byte // of a camera

func main() { errors.Is(nil, nil); log.Flags(); fmt.Print(); time.Now() }
"""
FUNCTION = """
func _(ctx context.Context, client *legato.Client, picture legato.Image) error {{
{}
	return nil
}}
"""
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
    return run("go", *words, **environment)


def go_test(*words: str, **environment: str) -> str:
    """The same of `go test`: its events."""
    return run(*programs.GO_TEST, *words, **environment)


def run(*words: str, **environment: str) -> str:
    """The output of a command in the client's folder, which must succeed."""
    done = subprocess.run(
        words,
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


def test_service_configuration():
    """Both clients tell gRPC the same: what it retries, and whose health it watches."""
    shipped = importlib.resources.files("legato_client") / "service_config.json"
    assert (programs.GO / "legato/service_config.json").read_text() == shipped.read_text()


def test_tests(server):
    """`go test` passes, and leaves nothing out: this server can do all that its tests need."""
    # tests/e2e/test_security.py runs the one that needs TLS, the next test the other one.
    words = ("-skip", "TestSecuredServer|TestLostServer", "./...")
    output = go_test(*words, LEGATO_SERVER=server.address)
    events = [json.loads(line) for line in output.splitlines()]
    ended = {event["Test"]: event["Action"] for event in events if "Test" in event}
    assert set(ended.values()) == {"pass"}, ended
    assert {"TestHeldImages", "TestSessions"} <= ended.keys()


def test_a_stream_outlives_its_server(server, tmp_path):
    """The Go client goes on with another server where the killed one was."""
    with Server(tmp_path, "--model", "null", "--null-step-ms", "500") as lost:
        variables = {
            "LEGATO_SERVER": server.address,
            "LEGATO_LOST_SERVER": lost.address,
            "LEGATO_LOST_PID": str(lost.process.pid),
        }
        output = go_test("-run", "^TestLostServer$", "./legato", **variables)
        events = [json.loads(line) for line in output.splitlines()]
        ended = {event["Test"]: event["Action"] for event in events if "Test" in event}
        assert ended == {"TestLostServer": "pass"}
        assert lost.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("example", "arguments"),
    [("detect", [STREET, "bus"]), ("stream", [STREET]), ("session", ["bus", STREET, STREET])],
)
def test_examples(server, example, arguments):
    """The examples print what they found."""
    assert go("run", f"./examples/{example}", "-server", server.address, *arguments)


def test_readme(tmp_path):
    """What the README of the client shows compiles."""
    blocks = re.findall(r"^```go\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    source, overlay = tmp_path / "main.go", tmp_path / "overlay.json"
    source.write_text(PREAMBLE + "".join(map(FUNCTION.format, blocks)))
    place = README.parent / "readme" / "main.go"
    overlay.write_text(json.dumps({"Replace": {str(place): str(source)}}))
    go("build", f"-overlay={overlay}", "-o", os.devnull, "./readme")  # no linking
