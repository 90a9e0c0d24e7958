"""The engine without a model refuses what an engine with one refuses: one table for both."""

import io
import time

import msgspec
import pytest
from legato_engine.ipc.messages import Failed
from legato_engine.null.engine import NullEngine
from legato_engine.shm import BlobReader
from legato_engine.types import (
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    RequestKey,
    SamplingParams,
)
from PIL import Image

from tests.engine.engine.core.world import CONFIG, World, png

HELLO = QueryTask(question="hello")


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
    ("PromptTooLong", QueryTask(question="word " * 9000), {}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(max_tokens=0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(temperature=-1.0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(temperature=float("nan"))}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(top_p=0.0)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(top_p=1.5)}),
    ("InvalidField", HELLO, {"sampling": SamplingParams(stop=("",))}),
    ("InvalidField", DetectTask(object="cat", max_objects=0), {"image": png()}),
    ("InvalidField", PointTask(object="cat", max_objects=0), {"image": png()}),
    ("ImageUndecodable", CaptionTask(), {"image": b"no image"}),
    ("ImageTooLarge", CaptionTask(), {"image": large_png()}),
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
