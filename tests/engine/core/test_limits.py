"""Limits of the queue, and invalid requests and images that fail alone."""

import dataclasses
import io
import time

import msgspec
import pytest
from legato_engine import failpoints
from legato_engine.errors import InternalError, InvalidField, TaskUnsupported, from_value
from legato_engine.ipc.messages import Done, Failed, OutputDelta, PrefillStarted, QueuePosition
from legato_engine.null_engine import NullEngine
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    EncodedImage,
    PointSpec,
    QuerySpec,
    RequestKey,
    SamplingParams,
)
from PIL import Image

from tests.engine.core.world import CONFIG, GatedFrontend, World, png

# ---------------------------------------------------------------- queue
# The waiting queue: positions, limits and ids in use.


def test_queued_is_sent_once_to_waiting_requests(world):
    """Only requests that find no free row get a queue position, once."""
    names = [f"r{i}" for i in range(7)]
    for name in names:
        world.submit(name, QuerySpec(question="hello"))
    world.run(*names)
    assert world.of("r0", QueuePosition) == []
    queued = [world.of(name, QueuePosition) for name in names]
    assert [len(outputs) for outputs in queued[1:]] == [1] * 6
    assert [outputs[0].position for outputs in queued[1:]] == list(range(6))
    for name in names:
        assert isinstance(world.of(name)[-2], OutputDelta | PrefillStarted)


def test_full_queue(gated):
    """Requests over `max_waiting` are refused; pending requests count."""
    world, frontend = gated
    for i in range(CONFIG.max_waiting):
        world.submit(f"r{i}", CaptionSpec(), world.encoded(png()))
    assert world.core.load().waiting == CONFIG.max_waiting
    world.submit("late", QuerySpec(question="hello"))
    assert type(world.error("late")).__name__ == "QueueFull"
    assert int(world.error("late").metadata["retry_after_ms"]) > 0
    frontend.gate.set()
    for done in world.run(*(f"r{i}" for i in range(CONFIG.max_waiting))):
        assert isinstance(done, Done)


def test_a_tenants_quota_counts_pending_requests(assembly):
    """A tenant over its quota gets QuotaExceeded before its image is read; other tenants do not."""
    frontend = GatedFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend), max_waiting_per_tenant=1)
    world.submit("a0", CaptionSpec(), world.encoded(png()), tenant="a")
    world.submit("a1", CaptionSpec(), world.encoded(png()), tenant="a")
    assert type(world.error("a1")).__name__ == "QuotaExceeded"
    world.submit("b0", CaptionSpec(), world.encoded(png()), tenant="b")
    frontend.gate.set()
    assert all(isinstance(done, Done) for done in world.run("a0", "b0"))
    world.close()


def test_the_queue_position_follows_the_priority(world):
    """The queue position counts only requests of a higher or equal rank."""
    for name in ("r0", "r1", "r2", "r3", "r4"):
        world.submit(name, QuerySpec(question="hello"))
    world.core.step()
    world.submit("low", QuerySpec(question="hello"), priority=-1)
    world.submit("high", QuerySpec(question="hello"), priority=100)
    world.run("low", "high")
    assert world.of("high", QueuePosition)[0].position == 0
    assert world.of("low", QueuePosition)[0].position > 0


def test_an_id_is_in_use_at_every_stage(gated):
    """A second request of an id in use fails; the pending or running first one goes on."""
    world, frontend = gated
    world.submit("pending", CaptionSpec(), world.encoded(png()))
    world.submit("scheduled", QuerySpec(question="hello"))
    for name in ("pending", "scheduled"):
        world.submit(name, QuerySpec(question="hello"))
        assert isinstance(world.error(name), InvalidField)
        world.outputs.clear()
    frontend.gate.set()
    assert all(isinstance(done, Done) for done in world.run("pending", "scheduled"))


# ---------------------------------------------------------------- faults
# Invalid requests and images fail alone, with an error that says why.


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "other"}, "ModelNotFound"),
        ({"adapter": "other"}, "AdapterNotFound"),
        ({"task": QuerySpec(question="word " * 1000)}, "PromptTooLong"),
        ({"task": DetectSpec(object="cat")}, "InvalidField"),
        ({"image": CachedImageRef(image_id="img_unknown")}, "ImageNotFound"),
        ({"deadline": 0.0}, "DeadlineExceeded"),
        ({"deadline": 0.0, "image": CachedImageRef(image_id="img_unknown")}, None),
    ],
)
def test_one_bad_request(world, fields, kind):
    """A request that cannot run fails alone, with the error that says why."""
    world.submit("good", QuerySpec(question="hello"))
    world.submit("bad", **{"task": QuerySpec(question="hello"), **fields})
    good, bad = world.run("good", "bad")
    assert isinstance(good, Done)
    assert isinstance(bad, Failed)
    assert kind in (None, type(world.error("bad")).__name__)


@pytest.mark.parametrize("data", [b"", b"GIF89a", png()[:200]])
def test_bad_image(world, data):
    """An image that cannot be decoded fails only its request."""
    world.submit("bad", CaptionSpec(), world.encoded(data))
    world.run("bad")
    assert type(world.error("bad")).__name__ == "ImageUndecodable"


def test_blob_outside_of_the_namespace(world):
    """A blob outside of the namespace is an internal error and is not opened."""
    other = BlobStore(new_namespace())
    ref = other.put(png())
    world.submit("bad", CaptionSpec(), EncodedImage(blob=ref, mime_type="image/png"))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    other.close()


def test_bug_in_the_frontend_is_internal(assembly):
    """An unexpected exception becomes InternalError without its text."""

    class Broken(GatedFrontend):
        def prepare_image(self, *arguments):
            raise ValueError("secret")

    world = World(dataclasses.replace(assembly, frontend=Broken(assembly.frontend)))
    world.submit("bad", CaptionSpec(), world.encoded(png()))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    assert "secret" not in world.error("bad").message
    world.close()


def test_a_wrong_request_does_not_wait_for_its_image(gated):
    """An error that does not depend on the image is sent at once."""
    world, frontend = gated
    world.submit("r", QuerySpec(question="word " * 1000), world.encoded(png()))
    assert type(world.error("r")).__name__ == "PromptTooLong"
    assert world.core.load().waiting == 0
    frontend.gate.set()


class BlindFrontend(GatedFrontend):
    """A frontend that takes no images, and blocks if it gets one."""

    max_images = 0

    def make_task(self, request, images=()):
        """Refuse a request with an image."""
        if request.image is not None:
            raise TaskUnsupported("blind")
        return self._frontend.make_task(request, images)


def test_no_image_is_prepared_for_a_model_without_images(assembly):
    """For a model without images none is prepared; its frontend refuses the request."""
    frontend = BlindFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend))
    world.submit("bytes", CaptionSpec(), world.encoded(png()))
    world.submit("named", CaptionSpec(), CachedImageRef(image_id="any"))
    world.submit("text", QuerySpec(question="hello"))
    held = world.hold(png())
    assert isinstance(world.run("text")[0], Done)
    assert isinstance(from_value(held.error), TaskUnsupported)
    assert isinstance(world.error("bytes"), TaskUnsupported)
    assert isinstance(world.error("named"), TaskUnsupported)
    assert not frontend.entered.is_set()
    world.close()


def test_logits_that_are_not_finite_fail_their_row_only(world, monkeypatch):
    """The first row of one launch fails with NumericError; its neighbour reads the same tokens."""
    world.submit("alone", QuerySpec(question="hello"), return_tokens=True)
    (alone,) = world.run("alone")
    points = failpoints._parse("sample.nan=corrupt@4")
    monkeypatch.setattr(failpoints, "_points", points)
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    for name in ("a", "b"):
        world.submit(name, QuerySpec(question="hello"), return_tokens=True)
    ends = world.run("a", "b")
    (failed,) = (each for each in ends if isinstance(each, Failed))
    assert failed.error.kind == "NumericError"
    (done,) = (each for each in ends if isinstance(each, Done))
    assert done.tokens == alone.tokens


# ---------------------------------------------------------------- the same without a model

HELLO = QuerySpec(question="hello")


class NullWorld(World):
    """A `World` without a model."""

    def __init__(self, assembly, **changes):
        super().__init__(assembly)
        self.core.close()
        config = msgspec.structs.replace(CONFIG, model="null", **changes)
        self.core = NullEngine(
            config, blobs=BlobReader(self.blobs.namespace), send=self.outputs.append
        )

    def _step(self):
        """Nothing wakes it."""
        self.core.step()

    def close(self):
        """There is nothing to finish."""
        self.blobs.close()


@pytest.fixture(params=[World, NullWorld], ids=["model", "null"])
def make_world(request, assembly):
    """Make an engine of either kind."""
    made = []

    def make(**changes):
        made.append(request.param(assembly, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def large_png():
    """The beginning of a PNG of 45 megapixels; noise of that size takes seconds to encode."""
    buffer = io.BytesIO()
    Image.new("1", (9000, 5000)).save(buffer, "PNG")
    return buffer.getvalue()[:4096]


TABLE = [
    ("ModelNotFound", HELLO, {"model": "other"}),
    ("AdapterNotFound", HELLO, {"adapter": "other"}),
    ("PromptTooLong", QuerySpec(question="word " * 9000), {}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(max_tokens=0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(temperature=-1.0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(temperature=float("nan"))}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(top_p=0.0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(top_p=1.5)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(stop=("",))}),
    ("InvalidField", DetectSpec(object="cat", max_objects=0), {"image": png()}),
    ("InvalidField", PointSpec(object="cat", max_objects=0), {"image": png()}),
    ("ImageUndecodable", CaptionSpec(), {"image": b"no image"}),
    ("ImageTooLarge", CaptionSpec(), {"image": large_png()}),
    ("DeadlineExceeded", HELLO, {"deadline": 0.0}),
]


@pytest.mark.parametrize(
    ("kind", "task", "fields"), TABLE, ids=[f"{n}-{row[0]}" for n, row in enumerate(TABLE)]
)
def test_both_refuse_it(make_world, kind, task, fields):
    """With the same type of error."""
    world = make_world()
    fields = dict(fields)
    if (data := fields.pop("image", None)) is not None:
        fields["image"] = world.encoded(data)
    world.submit("a", task, **fields)
    world.run("a")
    assert type(world.error("a")).__name__ == kind


def test_both_know_an_id_that_is_in_use(make_world):
    """The second request fails, the first goes on."""
    world = make_world(null_step_ms=0.01)
    world.submit("a", HELLO)
    world.submit("a", HELLO)
    assert type(world.error("a")).__name__ == "InvalidField"


def test_both_bound_the_queue(make_world):
    """At most `max_running` run and `max_waiting` wait; the next is refused."""
    world = make_world(null_step_ms=3_600_000)
    names = [f"r{n}" for n in range(CONFIG.max_running + CONFIG.max_waiting + 1)]
    for name in names:
        world.submit(name, HELLO)
    refused = [name for name in names if world.of(name) and isinstance(world.of(name)[-1], Failed)]
    assert {type(world.error(name)).__name__ for name in refused} == {"QueueFull"}
    accepted = len(names) - len(refused)
    assert CONFIG.max_waiting <= accepted <= CONFIG.max_running + CONFIG.max_waiting
    for name in names:
        world.core.abort(RequestKey(name))


def test_both_keep_a_tenants_quota_and_give_room_to_another(make_world):
    """QuotaExceeded for the tenant alone."""
    world = make_world(null_step_ms=3_600_000, max_waiting_per_tenant=2, max_running=1)
    for n in range(4):
        world.submit(f"a{n}", HELLO, tenant="a")
    assert type(world.error("a3")).__name__ == "QuotaExceeded"
    world.submit("b", HELLO, tenant="b")
    assert not [each for each in world.of("b") if isinstance(each, Failed)]
    for name in ("a0", "a1", "a2", "a3"):
        world.core.abort(RequestKey(name, "a"))
    world.core.abort(RequestKey("b", "b"))


def test_both_give_up_a_greedy_tenants_request(make_world):
    """A full queue takes the request of a tenant that has fewer."""
    world = make_world(null_step_ms=3_600_000, max_running=1, max_waiting=4)
    for n in range(6):
        world.submit(f"a{n}", HELLO, tenant="a")
    world.submit("b", HELLO, tenant="b")
    assert not [each for each in world.of("b") if isinstance(each, Failed)]
    gone = [n for n in range(6) if any(isinstance(each, Failed) for each in world.of(f"a{n}"))]
    assert gone[0] >= 3
    assert {type(world.error(f"a{n}")).__name__ for n in gone} == {"QueueFull"}
    for n in range(6):
        world.core.abort(RequestKey(f"a{n}", "a"))
    world.core.abort(RequestKey("b", "b"))


def test_null_cuts_an_answer_to_the_context(assembly):
    """As by a model: the greatest possible answer ends with LENGTH, and the last token fits."""
    world = NullWorld(assembly, max_context=32)
    world.submit("a", HELLO, sampling=SamplingParams(max_tokens=1000))
    (done,) = world.run("a")
    assert done.finish_reason == "length"
    assert done.usage.input_tokens + done.usage.output_tokens == 32 + 1
    world.close()


def test_null_refuses_a_deadline_that_it_cannot_meet(assembly):
    """Once it knows how long requests take."""
    world = NullWorld(assembly, null_step_ms=5.0, max_running=1)
    world.submit("first", HELLO)
    world.run("first")
    for n in range(3):
        world.submit(f"r{n}", HELLO)
    world.submit("late", HELLO, deadline=time.monotonic() + 0.01)
    assert type(world.error("late")).__name__ == "DeadlineUnreachable"
    world.close()
