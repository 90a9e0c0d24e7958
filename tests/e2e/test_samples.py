"""The sample images that come with legato-tiny, and what is in them."""

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path

import pytest
from legato_client import Box, Client

from tests.e2e.scenes import overlap
from tests.e2e.server import ENVIRONMENT, Server
from tests.e2e.test_unservable import refused_once

SAMPLES = importlib.resources.files("legato_tiny") / "samples"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
CASES = [(name, noun) for name, things in TRUTH.items() for noun in things]


def matched(boxes, truth):
    """How many of the true boxes have one of `boxes` on them."""
    return sum(any(overlap(box, true) > 0.5 for box in boxes) for true in truth)


@pytest.mark.parametrize(("name", "noun"), CASES)
def test_what_is_in_a_sample_is_found(client: Client, name: str, noun: str) -> None:
    """Every instance is boxed and pointed at, nothing else is."""
    image = (SAMPLES / name).read_bytes()
    truth = [Box(*corners) for corners in TRUTH[name][noun]]
    boxes = [found.box for found in client.detect(image, noun).objects]
    assert len(boxes) == len(truth) == matched(boxes, truth)
    points = [found.point for found in client.point(image, noun).points]
    spots = [Box(p.x - 0.01, p.y - 0.01, p.x + 0.01, p.y + 0.01) for p in points]
    assert len(points) == len(truth)
    assert all(any(overlap(spot, true) > 0 for true in truth) for spot in spots)


def test_a_quantised_file_is_served(tmp_path: Path) -> None:
    """The command's file answers like the weights that it was made from, in its own format only."""
    command = [sys.executable, "-m", "legato_client.cli", "quantize", "--model", "legato-tiny"]
    options = ["--weight-dtype", "int8", "--output", "tiny.safetensors"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--weights tiny.safetensors" in done.stdout
    weights = ("--weights", str(tmp_path / "tiny.safetensors"))
    (name, noun), *_ = CASES
    with Server(tmp_path, *weights) as server, Client(server.address) as asking:
        found = [each.box for each in asking.detect((SAMPLES / name).read_bytes(), noun).objects]
    truth = [Box(*corners) for corners in TRUTH[name][noun]]
    assert len(found) == len(truth) == matched(found, truth)
    other = (*weights, "--weight-dtype", "int4")
    refused_once(tmp_path, other, "weight_dtype", "was quantised as int8")
