"""The C++ client: its own tests, example and quickstart, against a real server."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
from pathlib import Path

import pytest

from tests.conformance import programs
from tests.e2e.server import Server

QUICKSTART = programs.ROOT / "docs" / "quickstart-cpp.md"

# The first build on a machine takes longer than a test may.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * programs.PATIENCE)]


@pytest.fixture(scope="module", autouse=True)
def built():
    """The client with all its programs."""
    try:
        programs.build_cpp("all")
    except programs.Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without a model, slow enough that a cancellation comes before the end."""
    options = ("--model", "null", "--null-step-ms", "10")
    with Server(tmp_path_factory.mktemp("cpp"), *options) as running:
        yield running
        running.settle()


def run(*words: str, cwd: Path = programs.ROOT) -> str:
    """Return the output of a program that must succeed."""
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, check=False, timeout=programs.PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests(server):
    """The client's own tests pass, and leave nothing open on the server."""
    run(str(programs.CPP_BUILD / "client_test"), server.address)


def test_example(server):
    """The example prints an outcome of every frame that it sent."""
    output = run(str(programs.CPP_BUILD / "session"), server.address, "cup", "5")
    assert re.search(r"^frame 1: (cup #\d+ )+$", output, re.MULTILINE), output


def test_quickstart(server, tmp_path):
    """The quickstart's program builds with the installed package, and prints what it found."""
    run("cmake", "--install", str(programs.CPP_BUILD), "--prefix", str(tmp_path / "prefix"))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", QUICKSTART.read_text(), re.MULTILINE | re.DOTALL)
    cmake, program = (
        next(text for kind, text in blocks if kind == one) for one in ("cmake", "cpp")
    )
    project = tmp_path / "hello"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(cmake)
    (project / "main.cc").write_text(program.replace("127.0.0.1:50051", server.address))
    street = importlib.resources.files("legato_tiny") / "samples" / "street.jpg"
    (project / "street.jpg").write_bytes(street.read_bytes())
    run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}", cwd=project)
    run("cmake", "--build", "build", cwd=project)
    assert "bus" in run("build/hello", cwd=project)
