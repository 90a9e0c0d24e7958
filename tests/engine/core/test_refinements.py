"""Refinement of outlines after their requests, on a real model with scripted text."""

import dataclasses
import gc
import io
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import PendingRefinement
from legato_engine.errors import InvalidField, QueueFull
from legato_engine.ipc.messages import Done, OutputDelta
from legato_engine.types import (
    DetectSpec,
    FinishReason,
    OutlineEvent,
    QuerySpec,
    RequestKey,
    SamplingParams,
    SegmentSpec,
)
from PIL import Image

from tests.engine.core.world import World
from tests.engine.models.moondream.refiner import scripted
from tests.engine.models.moondream.refiner.scripted import BRIGHT, DARK
from tests.engine.models.moondream.refiner.shapes import drawn, overlap

WIDTH, HEIGHT = 160, 120
EGG = SegmentSpec(object="egg")
SAMPLING = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration of the scripted model and its refiner."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted.write_model(folder)
    scripted.write_head(folder / "head.pt")
    return EngineConfig(
        model="legato-tiny",
        weights=str(folder),
        refiner=str(folder / "head.pt"),
        device="cpu",
        threads=1,
        max_running=4,
    )


@pytest.fixture(scope="module")
def assembly(config):
    """The scripted model and a trained refiner."""
    made = assemble(config)
    yield made
    made.device.close()


@pytest.fixture
def world(assembly):
    """An engine."""
    made = World(assembly)
    yield made
    made.close()


def truth():
    """The mask of the egg: an ellipse in the box that the model always gives."""
    (x, y), (width, height) = scripted.CENTRE, scripted.EXTENT
    ys, xs = (np.mgrid[:HEIGHT, :WIDTH] + 0.5) / np.array([HEIGHT, WIDTH]).reshape(2, 1, 1)
    return ((xs - x) / width) ** 2 + ((ys - y) / height) ** 2 < 0.25


def egg():
    """A PNG of it."""
    noise = np.random.default_rng(1).normal(0, 8, (HEIGHT, WIDTH, 3))
    pixels = np.where(truth()[..., None], BRIGHT, DARK) + noise
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def ask(world, name, **fields):
    """Submit a request for the egg's outline."""
    fields = {"sampling": SAMPLING, **fields}
    world.submit(name, EGG, world.encoded(egg()), **fields)


def outline(done):
    """Return the only outline of an output."""
    (found,) = done.result.segments
    return found


def likeness(found):
    """Return the overlap with the true mask."""
    box = msgspec.structs.astuple(found.box)
    return overlap(truth(), drawn(found.path, box, WIDTH, HEIGHT))


class Changed:
    """A refiner with some parts replaced."""

    def __init__(self, refiner, **parts):
        self._refiner = refiner
        self._parts = parts

    def __getattr__(self, name):
        return self._parts.get(name) or getattr(self._refiner, name)


class Gate:
    """Blocks its callers until it is opened."""

    def __init__(self, then):
        self._then = then
        self.pixels: weakref.ref[object] = weakref.ref(self)  # of the first caller
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self, outline, image):
        """Wait, and fail after a minute."""
        if not self.entered.is_set():
            self.pixels = weakref.ref(image.pixels.original)
        self.entered.set()
        assert self._open.wait(60)
        return self._then(outline, image)

    def open(self):
        """Let all callers pass."""
        self._open.set()


def with_parts(assembly, **parts):
    """Return an engine whose refiner has other parts."""
    return World(dataclasses.replace(assembly, refiner=Changed(assembly.refiner, **parts)))


@pytest.fixture
def gated(assembly):
    """An engine whose refinements wait for a gate."""
    gate = Gate(assembly.refiner.prepare)
    made = with_parts(assembly, prepare=gate)
    yield made, gate
    gate.open()
    made.close()


def wait_held(world, gate, *names):
    """Step until exactly these requests are being refined."""
    while world.core.requests.count(PendingRefinement) < len(names) or world.core.busy:
        world.core.step()
    assert gate.entered.wait(60)
    assert not any(world.of(name, Done) for name in names)


def test_an_outline_is_refined_before_it_is_sent(world):
    """Deltas have the coarse outline and the result the refined one; nothing else changes."""
    ask(world, "r")
    (done,) = world.run("r")
    events = [event for delta in world.of("r", OutputDelta) for event in delta.events]
    assert all(isinstance(event, OutlineEvent) for event in events)
    assert "".join(event.path_delta for event in events) == scripted.PATH
    better = outline(done)
    assert (better.label, better.coarse) == ("egg", False)
    assert likeness(better) > 0.85
    assert done.finish_reason is FinishReason.STOP
    assert done.usage.output_tokens == len(scripted.WORDS) + 4


def test_without_a_refiner_the_outline_stays_as_it_is(assembly):
    """The coarse outline overlaps the egg no more than a box does."""
    world = World(dataclasses.replace(assembly, refiner=None))
    ask(world, "r")
    (done,) = world.run("r")
    coarse = outline(done)
    assert (coarse.path, coarse.coarse) == (scripted.PATH, True)
    assert likeness(coarse) < 0.85
    world.close()


def test_concurrent_requests_change_nothing(world):
    """Six concurrent outlines are each what one is alone."""
    ask(world, "alone")
    (alone,) = world.run("alone")
    for number in range(6):
        ask(world, f"r{number}")
    world.submit("q", QuerySpec(question="What?"), world.encoded(egg()))
    world.submit("d", DetectSpec(object="egg"), world.encoded(egg()))
    *together, _, _ = world.run(*(f"r{number}" for number in range(6)), "q", "d")
    assert [done.result for done in together] == [alone.result] * 6


class Fault(BaseException):
    """An exception of a native library."""


def _fail(*given):
    raise Fault


@pytest.mark.parametrize("part", ["prepare", "finish"])
def test_a_failure_keeps_the_coarse_outline(assembly, part):
    """A failure in either half keeps the coarse outline; the next outline is tried again."""
    world = with_parts(assembly, **{part: _fail})
    for name in ("a", "b"):
        ask(world, name)
        (done,) = world.run(name)
        assert (outline(done).path, outline(done).coarse) == (scripted.PATH, True)
        assert done.finish_reason is FinishReason.STOP
    assert (world.core.refinements.num_unrefined, world.core.refinements.num_refined) == (2, 0)
    world.close()


def test_nan_keeps_the_coarse_outline(assembly):
    """The head's result is checked for NaN before it is traced."""
    finish = assembly.refiner.finish
    world = with_parts(assembly, finish=lambda *given: finish(*given[:2], given[2] * np.nan))
    ask(world, "r")
    assert outline(*world.run("r")).coarse
    world.close()


def test_others_go_on_while_an_outline_is_refined(gated):
    """A pending refinement counts as running, and other requests go on."""
    world, gate = gated
    ask(world, "r")
    wait_held(world, gate, "r")
    assert world.core.load().running == 1
    assert world.core.load().pages_used == 0
    world.submit("q", QuerySpec(question="What?"))
    world.run("q")
    assert not world.of("r", Done)
    gate.open()
    assert not outline(*world.run("r")).coarse


def test_an_aborted_request_sends_nothing_more(gated):
    """An aborted refinement sends nothing and frees its image."""
    world, gate = gated
    ask(world, "r", cache_image=False)
    wait_held(world, gate, "r")
    world.core.abort(RequestKey("r"))
    gate.open()
    ask(world, "s")
    assert not outline(*world.run("s")).coarse
    assert not world.of("r", Done)
    gc.collect()
    assert gate.pixels() is None


def test_a_result_for_an_aborted_request_is_not_its_successors(world):
    """A request that reuses the id while the device works for the aborted one is refined itself."""
    ask(world, "r")
    requests = world.core.requests
    while not getattr(requests.get(RequestKey("r")), "refinement", None):
        if not world.core.busy:
            world.woken.wait(10)
            world.woken.clear()
        world.core.step()
    first = requests.get(RequestKey("r")).refinement
    world.core.abort(RequestKey("r"))
    ask(world, "r")
    (done,) = world.run("r")
    assert first.result is not None
    assert not outline(done).coarse
    assert world.core.refinements.num_refined == 1


def test_a_stopped_request_gets_the_coarse_outline(gated):
    """A stop sends the coarse outline at once, with the model's finish reason."""
    world, gate = gated
    ask(world, "r")
    wait_held(world, gate, "r")
    world.core.stop(RequestKey("r"))
    (done,) = world.of("r", Done)
    assert (outline(done).coarse, done.finish_reason) == (True, FinishReason.STOP)
    gate.open()
    ask(world, "s")
    world.run("s")
    assert len(world.of("r", Done)) == 1


def test_a_deadline_gets_the_coarse_outline(gated):
    """At the deadline the coarse outline is sent, and the loop wakes for it."""
    world, gate = gated
    deadline = time.monotonic() + 3600
    ask(world, "r", deadline=deadline)
    wait_held(world, gate, "r")
    assert world.core.next_deadline() == deadline
    held = world.core.requests.remove(RequestKey("r"))
    world.core.requests.add(dataclasses.replace(held, deadline=time.monotonic()))
    world.core.step()
    (done,) = world.of("r", Done)
    assert outline(done).coarse


def test_pending_refinements_take_places_in_the_queue(gated):
    """Pending refinements count against the queue limit, before an image is decoded."""
    world, gate = gated
    places = world.core.scheduler.admission.max_waiting
    ask(world, "r")
    wait_held(world, gate, "r")
    held = world.core.requests.get(RequestKey("r"))
    for number in range(places):
        world.core.requests.add(dataclasses.replace(held, request_id=RequestKey(f"r{number}")))
    ask(world, "one more")
    assert isinstance(world.error("one more"), QueueFull)
    for number in range(places):
        world.core.abort(RequestKey(f"r{number}"))
    gate.open()
    world.run("r")


def test_an_id_is_in_use_until_its_outline_is_sent(gated):
    """A second request of the id fails, the first does not."""
    world, gate = gated
    ask(world, "r")
    wait_held(world, gate, "r")
    world.submit("r", QuerySpec(question="What?"))
    assert isinstance(world.error("r"), InvalidField)
    gate.open()
    while not world.of("r", Done):
        world.woken.wait(10)
        world.core.step()
    assert not outline(world.of("r", Done)[-1]).coarse


@pytest.mark.parametrize("max_tokens", [3, 5])
def test_what_has_no_path_is_not_refined(world, max_tokens):
    """An outline without box or path is sent as it is."""
    ask(world, "r", sampling=SamplingParams(max_tokens=max_tokens))
    (done,) = world.run("r")
    assert all(each.coarse for each in done.result.segments)
    assert world.core.refinements.num_refined == 0


def test_a_refiner_that_cannot_be_used_stops_the_start(config, tmp_path):
    """The error names the setting."""
    missing = msgspec.structs.replace(config, refiner=str(tmp_path / "none.pt"))
    with pytest.raises(InvalidField, match="cannot be read") as caught:
        assemble(missing)
    assert caught.value.metadata["field"] == "refiner"
    for model in ("random-tiny", "legato-tiny"):
        with pytest.raises(InvalidField, match="takes no refiner"):
            assemble(msgspec.structs.replace(config, model=model, weights=""))
