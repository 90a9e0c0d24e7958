"""The sample images that come with legato-tiny, and what is in them."""

import importlib.resources
import json

import pytest
from legato_client import Box, Client

from tests.e2e.scenes import overlap

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
