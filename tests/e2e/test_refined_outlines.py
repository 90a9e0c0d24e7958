"""Outlines of a server that refines them, from a caller's end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client import Client, Point, SegmentResult, SegmentTask
from PIL import Image, ImageDraw

from tests.e2e.server import Server
from tests.engine.models.moondream.refiner import scripted
from tests.grammar import check

SIZE = (200, 150)
TASK = task_pb2.Task(segment=task_pb2.SegmentTask(object="egg"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny Moondream 3 that always says one outline, and a head that finds what is bright."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted.write_model(folder)
    scripted.write_head(folder / "head.pt")
    with Server(folder, "--weights", str(folder), "--refiner", str(folder / "head.pt")) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    """A client of that server."""
    with Client(server.address) as connected:
        yield connected


def picture() -> tuple[Image.Image, Image.Image]:
    """A bright ellipse in the dark, and its mask."""
    (x, y), (width, height) = scripted.CENTRE, scripted.EXTENT
    box = [
        (side * SIZE[axis])
        for side, axis in [
            (x - width / 2, 0),
            (y - height / 2, 1),
            (x + width / 2, 0),
            (y + height / 2, 1),
        ]
    ]
    image, mask = Image.new("RGB", SIZE, (40, 40, 40)), Image.new("1", SIZE)
    ImageDraw.Draw(image).ellipse(box, fill=(220, 220, 220))
    ImageDraw.Draw(mask).ellipse(box, fill=1)
    return image, mask


def overlap(polygons: tuple[tuple[Point, ...], ...], mask: Image.Image) -> float:
    """Intersection over union of polygons and a mask."""
    drawn = Image.new("1", SIZE)
    for ring in polygons:
        ImageDraw.Draw(drawn).polygon([(p.x * SIZE[0], p.y * SIZE[1]) for p in ring], fill=1)
    one, other = np.asarray(drawn), np.asarray(mask)
    return float((one & other).sum() / (one | other).sum())


def test_a_caller_gets_the_refined_outline(client: Client) -> None:
    """Its polygons are what is there, within a few pixels of a small image."""
    image, mask = picture()
    result = client.segment(image, "egg")
    (found,) = result.segments
    assert not found.coarse
    assert "C" in found.path
    assert overlap(found.polygons(), mask) > 0.85
    assert result.info.finish_reason == "stop"


def test_a_stream_draws_the_coarse_outline_and_ends_with_the_refined_one(server: Server) -> None:
    """The events keep to the grammar, and the result is the unary call's."""
    image, _ = picture()
    with Client(server.address) as client:
        message = client.segment(image, "egg")
    request = inference_pb2.GenerateRequest(task=TASK)
    assert message.info.image is not None
    request.image.image_id = message.info.image.image_id
    grammar = check(server.inference.Generate(request), ok=True)
    told = "".join(event.outline.path_delta for event in grammar.of("outline"))
    (finished,) = grammar.of("finished")
    (segment,) = finished.finished.result.segment.segments
    assert told == scripted.PATH
    assert segment.path == message.segments[0].path != told


def test_many_outlines_at_once_are_all_refined(client: Client) -> None:
    """Tasks of one call, each as it is alone."""
    image, _ = picture()
    alone = client.segment(image, "egg").segments
    together = client.run_tasks(image, [SegmentTask("egg")] * 8)
    assert [each.segments for each in together if isinstance(each, SegmentResult)] == [alone] * 8
