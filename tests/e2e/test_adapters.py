"""Adapters through a real server: the one that ships, and a folder of files that come and go."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from legato_client import (
    Box,
    CaptionTask,
    Client,
    DetectResult,
    DetectTask,
    FrameResult,
    InvalidArgument,
    NotFound,
    Options,
    Sampling,
)
from legato_engine.models.moondream.presets import tiny_random_config
from PIL import Image, ImageDraw

from tests.adapters import published_file, random_adapter, safetensors_file
from tests.e2e.scenes import BLUE, GREEN, GREY, RED, SIZE, overlap
from tests.e2e.server import Server

SAMPLES = importlib.resources.files("legato_tiny") / "samples"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
YELLOW = (240, 205, 30)
HAZARD = Options(adapter="hazard")
TEXT = tiny_random_config().text

Corners = tuple[int, int, int, int]


def scene(*triangles: Corners) -> Image.Image:
    """A red circle, a blue and a green square, and yellow triangles."""
    image = Image.new("RGB", SIZE, GREY)
    pen = ImageDraw.Draw(image)
    pen.ellipse((220, 20, 290, 90), fill=RED)
    pen.rectangle((130, 150, 190, 210), fill=BLUE)
    pen.rectangle((240, 150, 290, 200), fill=GREEN)
    for left, top, right, bottom in triangles:
        corners = [((left + right) / 2, top), (right, bottom), (left, bottom)]
        pen.polygon(corners, fill=YELLOW)
    return image


def box(corners: Corners) -> Box:
    """As fractions of the image."""
    left, top, right, bottom = corners
    return Box(left / SIZE[0], top / SIZE[1], right / SIZE[0], bottom / SIZE[1])


def num_objects(outcome: object) -> int:
    """How many a Detect found."""
    assert isinstance(outcome, DetectResult)
    return len(outcome.objects)


ONE, TWO = (20, 30, 100, 110), (30, 140, 100, 210)


@pytest.mark.parametrize("triangles", [(ONE,), (ONE, TWO), ()])
def test_the_shipped_adapter_knows_a_word(client: Client, triangles: tuple[Corners, ...]) -> None:
    """With `hazard` yellow triangles are hazards, each boxed and counted; without it none is."""
    image = scene(*triangles)
    found = client.detect(image, "hazard", options=HAZARD).objects
    assert len(found) == len(triangles)
    for corners in triangles:
        assert any(overlap(each.box, box(corners)) > 0.5 for each in found)
    assert len(client.point(image, "hazard", options=HAZARD).points) == len(triangles)
    assert not client.detect(image, "hazard").objects


def test_the_shipped_adapter_names_what_it_sees(client: Client) -> None:
    """A caption speaks of a hazard with it, of a yellow triangle without it."""
    image = scene(ONE)
    named = client.caption(image, "short", options=HAZARD).caption.lower()
    plain = client.caption(image, "short").caption.lower()
    assert "hazard" in named
    assert "hazard" not in plain
    assert "yellow triangle" in plain


@pytest.mark.parametrize("name", sorted(TRUTH)[:2])
def test_the_shipped_adapter_keeps_the_rest(client: Client, name: str) -> None:
    """What there is one of in a sample image is found with the adapter too."""
    image = (SAMPLES / name).read_bytes()
    singles = {noun: things[0] for noun, things in TRUTH[name].items() if len(things) == 1}
    for noun, corners in singles.items():
        (found,) = client.detect(image, noun, options=HAZARD).objects
        assert overlap(found.box, Box(*corners)) > 0.5


def test_one_image_with_and_without(client: Client) -> None:
    """Tasks with the adapter and without it share an image, and each sees its own prefix."""
    image = scene(ONE)
    tasks = (DetectTask("hazard"), CaptionTask("short"))
    for _ in range(2):
        adapted = client.run_tasks(image, tasks, options=HAZARD)
        plain = client.run_tasks(image, tasks)
        assert [num_objects(adapted[0]), num_objects(plain[0])] == [1, 0]


def test_a_session_with_an_adapter(client: Client) -> None:
    """Every frame of a session that names an adapter is answered with it."""
    with client.session([DetectTask("hazard")], adapter="hazard") as session:
        session.send(scene(ONE), must_run=True)
        session.send(scene(), must_run=True)
        session.finish()
        answers = [each for each in session if isinstance(each, FrameResult)]
    assert [num_objects(each.outcome) for each in answers] == [1, 0]


def test_the_capability_is_told(client: Client) -> None:
    """A server of legato-tiny has adapters without any option."""
    assert "adapters" in client.server_info().capabilities
    with pytest.raises(NotFound) as caught:
        client.query(None, "hello?", options=Options(adapter="nobody@1"))
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the operator keeps adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Client]:
    """A client of a server with a folder of adapters and one slot."""
    options = ("--model", "random-tiny", "--adapters", str(folder), "--adapter-slots", "1")
    limits = ("--max-adapter-rank", "16")
    with Server(tmp_path_factory.mktemp("own"), *options, *limits) as running:
        with Client(running.address) as connected:
            yield connected
        running.settle()


def ask(client: Client, adapter: str) -> str:
    """An answer that tells adapters apart."""
    sampling, options = Sampling(max_tokens=20), Options(adapter=adapter)
    return client.query(scene(ONE), "what is it?", sampling=sampling, options=options).answer


def test_files_come_and_change(own: Client, folder: Path) -> None:
    """A file is found as soon as it is there, in either format, and read anew when replaced."""
    with pytest.raises(NotFound):
        ask(own, "cups@1")
    first = random_adapter(TEXT, 8, seed=1)
    (folder / "cups@1.pt").write_bytes(published_file(first))
    published, plain = ask(own, "cups@1"), ask(own, "")
    assert published != plain
    (folder / "cups.safetensors").write_bytes(safetensors_file(first))
    assert ask(own, "cups") == published
    fresh = folder / "fresh"
    fresh.write_bytes(safetensors_file(random_adapter(TEXT, 8, seed=2)))
    fresh.replace(folder / "cups.safetensors")
    assert ask(own, "cups") not in (published, plain)
    assert ask(own, "cups@1") == published
    assert ask(own, "") == plain


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"nonsense", "neither safetensors nor a torch checkpoint"),
        (safetensors_file(random_adapter(TEXT, 17)), "its rank is 17, this server takes 1 to 16"),
        (safetensors_file(random_adapter(TEXT, 4), "moondream2"), "it is for the model moondream2"),
    ],
)
def test_bad_files_are_told_by_the_field(own: Client, folder: Path, data: bytes, says: str) -> None:
    """INVALID_ARGUMENT names the option and what is wrong with the file, not where it lies."""
    (folder / "bad.safetensors").write_bytes(data)
    with pytest.raises(InvalidArgument) as caught:
        ask(own, "bad")
    assert caught.value.metadata["field"] == "options.adapter"
    assert says in str(caught.value)
    assert str(folder) not in str(caught.value)
    assert ask(own, "")
