"""The grpcurl commands of the shell quickstart, run unchanged by the real grpcurl."""

import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join((str(ROOT / ".tools" / "bin"), os.environ["PATH"]))
PAGE = (ROOT / "docs" / "quickstart-shell.md").read_text()
STREET = importlib.resources.files("legato_tiny") / "samples" / "street.jpg"

pytestmark = pytest.mark.skipif(
    shutil.which("grpcurl", path=PATH) is None,
    reason="needs grpcurl: `make tools` installs it where go is installed",
)


def commands() -> list[str]:
    """Return the commands of the quickstart that begin with grpcurl, with their here-documents."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    found = [re.split(r"^(?=grpcurl )", block, flags=re.MULTILINE) for block in blocks]
    return [part for parts in found for part in parts if part.startswith("grpcurl ")]


def command(*words: str) -> str:
    """The one command that holds all these words."""
    (found,) = [each for each in commands() if all(word in each for word in words)]
    return found


@pytest.fixture
def shell(server, tmp_path):
    """Run a command of the quickstart beside a street.jpg, on the test's server; its output."""
    (tmp_path / "street.jpg").write_bytes(STREET.read_bytes())

    def run(text: str) -> str:
        assert "127.0.0.1:50051" in text
        done = subprocess.run(
            ["bash", "-euc", text.replace("127.0.0.1:50051", server.address)],
            cwd=tmp_path,
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def messages(text: str) -> list[dict[str, Any]]:
    """The JSON documents that follow each other in grpcurl's output."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:]
    return found


def test_list(shell):
    """All that is served is listed."""
    assert shell(command(" list")).split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
        "legato.v1.AdminService",
        "legato.v1.ImageService",
        "legato.v1.InferenceService",
        "legato.v1.ServerService",
        "legato.v1.SessionService",
    ]


def test_describe(shell):
    """The service is shown with its RPCs and their comments."""
    shown = shell(command(" describe "))
    assert "rpc Detect ( .legato.v1.DetectRequest ) returns ( .legato.v1.DetectResponse )" in shown
    assert "// Boxes every instance of an object." in shown
    assert "stream .legato.v1.GenerateResponse" in shown


def test_detect(shell):
    """The quickstart's request boxes what is in the image; asked for what is not, it finds none."""
    detect = command("InferenceService/Detect")
    (empty,) = messages(shell(detect.replace("bus", "bicycle")))
    assert empty["info"]["finishReason"] == "FINISH_REASON_STOP"
    assert empty["info"]["image"]["width"] > 0
    (response,) = messages(shell(detect))
    (found,) = response["objects"]
    assert found["label"] == "bus"
    assert 0 <= found["box"]["xMin"] < found["box"]["xMax"] <= 1


def test_generate(shell):
    """The stream's messages arrive one by one, from `started` to `finished`."""
    events = messages(shell(command("InferenceService/Generate")))
    assert "started" in events[0]
    words = [event["text"]["text"] for event in events if "text" in event]
    assert words  # how many depends on how fast the reader is
    assert events[-1]["finished"]["result"]["caption"]["caption"] == "".join(words)
    assert [int(event.get("index", 0)) for event in events] == list(range(len(events)))


def test_the_banner_of_a_server_can_be_run(shell):
    """The line that `legato serve` suggests works as it is printed."""
    from legato_service.console import example

    line = example("127.0.0.1:50051", ("detect",)).replace("photo.jpg", "street.jpg")
    program = f"{sys.executable} -m legato_client.cli"
    (response,) = messages(shell(line.replace("legato", program, 1) + " --json"))
    assert response["info"]["model"] == "legato-tiny"
