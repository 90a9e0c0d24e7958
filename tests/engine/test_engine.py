"""The engine without its process, on a real model with random weights."""

import dataclasses
import gc
import io
import math
import random
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest
from legato_engine.assembly import assemble
from legato_engine.blob_reader import BlobReader
from legato_engine.blobs import BlobStore, new_namespace
from legato_engine.config import EngineConfig
from legato_engine.core import (
    Box,
    CachedImage,
    CaptionResult,
    CaptionTask,
    DetectResult,
    DetectTask,
    EncodedImage,
    FinishReason,
    PixelFormat,
    Point,
    PointTask,
    QueryResult,
    QueryTask,
    RawImage,
    Request,
    SamplingParams,
    SegmentTask,
    TaskResult,
    TextDelta,
    Turn,
)
from legato_engine.errors import InternalError, TaskUnsupported, from_value
from legato_engine.messages import (
    Delta,
    Done,
    DropImage,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Load,
    Queued,
    Report,
    Started,
)
from PIL import Image

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=3, max_waiting=8, page_size=16
)


@pytest.fixture(scope="module")
def assembly(request):
    """One model for all tests, unless a test names another."""
    made = assemble(msgspec.structs.replace(CONFIG, model=getattr(request, "param", CONFIG.model)))
    yield made
    made.device.close()


EITHER_KIND = pytest.mark.parametrize(
    "assembly", ["random-tiny", "random-tiny3"], indirect=True, scope="module"
)


def png(seed=0, size=(40, 30), **options):
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


class World:
    """A core, the blobs it reads and the reports it sent."""

    def __init__(self, assembly, **changes):
        config = msgspec.structs.replace(assembly.config, **changes)
        assembly = dataclasses.replace(assembly, config=config)
        self.reports: list[Report] = []
        self.woken = threading.Event()
        self.blobs = BlobStore(new_namespace())
        self.core = assembly.core(
            blobs=BlobReader(self.blobs.namespace), send=self.reports.append, wake=self.woken.set
        )

    def encoded(self, data):
        """A picture file in a blob."""
        return EncodedImage(blob=self.blobs.put(data), mime_type="image/png")

    def submit(self, name, task, image=None, **fields):
        """Hand a request to the core."""
        sampling = fields.pop("sampling", SamplingParams(max_tokens=12))
        self.core.submit(
            Request(request_id=name, task=task, image=image, sampling=sampling, **fields)
        )

    def of(self, name, kind=object):
        """Reports of one request."""
        return [
            r for r in self.reports if getattr(r, "request_id", "") == name and isinstance(r, kind)
        ]

    def run(self, *names):
        """Step until every named request has ended."""
        while not all(self.of(name, Done | Failed) for name in names):
            if not self.core.busy:
                self.woken.wait(10)
                self.woken.clear()
            self.core.step()
        return [self.of(name, Done | Failed)[-1] for name in names]

    def error(self, name):
        """A failed request's error."""
        return from_value(self.of(name, Failed)[-1].error)

    def close(self):
        """Finish; everything must have been given back."""
        while self.core.busy:
            self.core.step()
        load = self.core.load()
        assert load == Load(
            pages_total=load.pages_total,
            prefix_pages=load.prefix_pages,
            images_cached=load.images_cached,
            kv=load.kv,
        )
        self.core.close()
        self.blobs.close()


@pytest.fixture
def world(assembly):
    """A core over the shared model."""
    made = World(assembly)
    yield made
    made.close()


class GatedFrontend:
    """A frontend whose pictures are prepared only once `gate` is set."""

    def __init__(self, frontend):
        self._frontend = frontend
        self.gate = threading.Event()
        self.entered = threading.Event()

    def prepare_image(self, *arguments):
        """Wait for the gate."""
        self.entered.set()
        self.gate.wait(30)
        return self._frontend.prepare_image(*arguments)

    def __getattr__(self, name):
        return getattr(self._frontend, name)


@pytest.fixture
def gated(assembly):
    """A core whose pictures wait for a gate."""
    frontend = GatedFrontend(assembly.frontend)
    made = World(dataclasses.replace(assembly, frontend=frontend))
    yield made, frontend
    frontend.gate.set()
    made.close()


@EITHER_KIND
@pytest.mark.parametrize(
    "task",
    [
        QueryTask(question="what?"),
        QueryTask(question="what?", reasoning=True),
        QueryTask(question="what?", system="s", history=(Turn(question="a", answer="b"),)),
        CaptionTask(),
        DetectTask(object="cat", max_objects=3),
        PointTask(object="cat", max_objects=3),
        SegmentTask(object="cat"),
    ],
    ids=lambda task: type(task).__name__,
)
def test_every_task_on_a_picture(world, task):
    """A request reports Started, deltas and Done, in that order, with usage and timings."""
    world.submit("r", task, world.encoded(png()))
    (done,) = world.run("r")
    assert isinstance(done, Done)
    kinds = [type(r) for r in world.of("r")]
    assert kinds[0] is Started
    assert kinds[-1] is Done
    assert set(kinds[1:-1]) <= {Delta}
    started = world.of("r")[0]
    assert started.image == done.image
    assert done.image is not None
    assert (done.image.width, done.image.height, done.image.cache_hit) == (40, 30, False)
    usage = done.usage
    assert usage.input_tokens == started.input_tokens > usage.image_tokens > 0
    assert usage.output_tokens > 0
    timings = done.timings
    assert 0 < timings.first_token <= timings.total
    assert timings.image > 0


def test_text_deltas_add_up_to_the_result(world):
    """The deltas of a caption spell its result."""
    world.submit("r", CaptionTask(), world.encoded(png()))
    (done,) = world.run("r")
    texts = [e.text for d in world.of("r", Delta) for e in d.events if isinstance(e, TextDelta)]
    assert isinstance(done.result, CaptionResult)
    assert "".join(texts) == done.result.caption


def test_question_without_a_picture(world):
    """A question needs no image; its Started names none."""
    world.submit("r", QueryTask(question="hello"))
    (done,) = world.run("r")
    assert done.image is None
    assert done.usage.image_tokens == 0


@EITHER_KIND
def test_picture_is_cached_by_content_and_by_id(world):
    """The same bytes, and the id that was given for them, are hits with the same answer."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    world.submit("b", DetectTask(object="x"), world.encoded(png()))
    world.submit("c", DetectTask(object="x"), CachedImage(image_id=first.image.image_id))
    for done in world.run("b", "c"):
        assert done.image.cache_hit
        assert done.image.image_id == first.image.image_id
        assert done.usage.cached_tokens > 0
        assert done.result == first.result
    assert world.core.load().images_cached == 1


def test_the_load_says_what_was_found_and_what_is_kept(world):
    """Of two equal questions the second finds all of its prompt but the end; both leave pages."""
    world.submit("a", QueryTask(question="what is to be seen in this picture?"))
    world.run("a")
    world.submit("b", QueryTask(question="what is to be seen in this picture?"))
    (done,) = world.run("b")
    usage, load = done.usage, world.core.load()
    assert usage.input_tokens - 2 <= usage.cached_tokens < usage.input_tokens
    assert load.kv.hit_rate == pytest.approx(usage.cached_tokens / usage.input_tokens / 2)
    assert (load.kv.idle, load.kv.draft, load.kv.preemptions) == (load.prefix_pages, 0, 0)
    assert load.kv.free + load.kv.idle + load.pages_used == load.pages_total


@pytest.mark.parametrize("by", ["bytes", "id"])
def test_a_known_picture_needs_no_thread(world, by):
    """With nothing to run, a request on a known picture is ready when it has been submitted."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    named = CachedImage(image_id=first.image.image_id)
    world.submit("b", DetectTask(object="x"), named if by == "id" else world.encoded(png()))
    assert world.core.busy
    assert world.core.next_deadline() == math.inf
    world.core.step()
    assert world.of("b", Started)


def test_bytes_are_not_hashed_between_ticks(world):
    """While others run, a picture's bytes are left to a thread, also when they are known."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    world.submit("other", QueryTask(question="hello"))
    world.submit("b", DetectTask(object="x"), world.encoded(png()))
    assert world.core.load().waiting == 2
    assert [job.request.request_id for job in world.core._jobs.values()] == ["b"]
    done = world.run("other", "b")[1]
    assert done.image.cache_hit
    assert done.result == first.result


def test_deltas_only_for_those_who_read_them(world):
    """A request without deltas gets the same result, told by its end alone."""
    world.submit("a", CaptionTask(), world.encoded(png()))
    world.submit("b", CaptionTask(), world.encoded(png()), deltas=False)
    first, second = world.run("a", "b")
    assert world.of("a", Delta)
    assert [type(report) for report in world.of("b") if not isinstance(report, Queued)] == [
        Started,
        Done,
    ]
    assert second.result == first.result


def test_progress_only_for_those_who_read_it(world):
    """A request whose caller reads its end alone is told that and nothing else."""
    names = [f"r{number}" for number in range(5)]  # more than run at a time
    for name in names:
        question = QueryTask(question="What is it?")
        world.submit(name, question, deltas=False, progress=False)
    world.run(*names)
    assert {type(report) for name in names for report in world.of(name)} == {Done}


def hold(world, data, name="h", ttl=60.0):
    """How holding a picture ended."""
    command = HoldImage(request_id=name, image=world.encoded(data), owner="me", ttl=ttl)
    world.core.hold(command)
    while not world.of(name, ImageHeld | Failed):
        if not world.core.busy:
            world.woken.wait(10)
            world.woken.clear()
        world.core.step()
    return world.of(name, ImageHeld | Failed)[-1]


def test_a_held_picture_answers_as_its_bytes_do(world):
    """Uploading a picture and naming it gives what sending it gives; dropped, it is unknown."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()), cache_image=False)
    (by_bytes,) = world.run("a")
    named = CachedImage(image_id=hold(world, png()).image.image_id)
    world.submit("b", DetectTask(object="x"), named)
    (by_id,) = world.run("b")
    assert by_id.result == by_bytes.result
    assert by_id.image.cache_hit
    world.core.drop(DropImage(request_id="d", image_id=named.image_id, owner="me"))
    assert world.of("d", ImageDropped)
    world.submit("c", DetectTask(object="x"), named)
    world.run("c")
    assert type(world.error("c")).__name__ == "ImageNotFound"


def test_a_running_request_keeps_its_picture(world):
    """A picture that is dropped while a request waits for it answers that request all the same."""
    named = CachedImage(image_id=hold(world, png()).image.image_id)
    world.submit("a", DetectTask(object="x"), named)
    world.core.drop(DropImage(request_id="d", image_id=named.image_id, owner="me"))
    assert isinstance(world.run("a")[0], Done)


def test_the_loop_wakes_for_the_end_of_a_hold(world):
    """An idle engine lets a picture go when its time is over, and not only when it is asked."""
    held = hold(world, png(), ttl=0.05)
    assert world.core.next_deadline() == held.until
    assert world.core.load().images_cached == 1
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.core.step()
    assert world.core.load().images_cached == 0
    assert world.core.next_deadline() == math.inf


def test_a_hold_ends_on_time_however_late_the_loop_is(world):
    """Who asks behind the end is told so, also where the loop has not come round since."""
    held = hold(world, png(), ttl=0.05)
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.submit("late", DetectTask(object="x"), CachedImage(image_id=held.image.image_id))
    assert type(world.error("late")).__name__ == "ImageNotFound"


def test_holds_wait_in_the_same_queue(assembly):
    """Pictures to be held are refused like requests when too many of both wait."""
    world = World(assembly, max_waiting=1, preprocess_threads=1)
    gated = GatedFrontend(assembly.frontend)
    world.core._preprocessor._frontend = gated
    for number in range(3):
        image = world.encoded(png(number))
        world.core.hold(HoldImage(request_id=str(number), image=image, owner="me", ttl=9.0))
    assert [type(world.error(name)).__name__ for name in "12"] == ["QueueFull"] * 2
    assert not world.of("0")
    for number in range(3):
        world.core.abort(str(number))
    gated.gate.set()
    world.close()


def test_uncached_picture_leaves_nothing(world):
    """With cache_image off neither the picture nor its prefix is kept."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()), cache_image=False)
    (done,) = world.run("a")
    assert world.core.load().images_cached == 0
    assert world.core.load().prefix_pages == 0
    world.submit("b", DetectTask(object="x"), CachedImage(image_id=done.image.image_id))
    world.run("b")
    assert type(world.error("b")).__name__ == "ImageNotFound"


def test_raw_picture_answers_like_its_file(world):
    """Raw pixels and the PNG of them are the same picture."""
    data = png()
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    raw = RawImage(
        blob=world.blobs.put(pixels.tobytes()),
        width=40,
        height=30,
        row_stride=120,
        format=PixelFormat.RGB8,
    )
    world.submit("raw", CaptionTask(), raw)
    world.submit("png", CaptionTask(), world.encoded(data))
    raw_done, png_done = world.run("raw", "png")
    assert raw_done.result == png_done.result


def test_oriented_picture(world):
    """ImageInfo gives the size as displayed."""
    exif = Image.Exif()
    exif[0x0112] = 6
    world.submit("r", CaptionTask(), world.encoded(png(exif=exif.tobytes())))
    (done,) = world.run("r")
    assert (done.image.width, done.image.height) == (30, 40)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "other"}, "ModelNotFound"),
        ({"adapter": "other"}, "AdapterNotFound"),
        ({"task": QueryTask(question="word " * 1000)}, "PromptTooLong"),
        ({"task": DetectTask(object="cat")}, "InvalidField"),
        ({"image": CachedImage(image_id="img_unknown")}, "ImageNotFound"),
        ({"deadline": 0.0}, "DeadlineExceeded"),
        ({"deadline": 0.0, "image": CachedImage(image_id="img_unknown")}, None),
    ],
)
def test_one_bad_request(world, fields, kind):
    """A request that cannot run fails alone, with the error that says why."""
    world.submit("good", QueryTask(question="hello"))
    world.submit("bad", **{"task": QueryTask(question="hello"), **fields})
    good, bad = world.run("good", "bad")
    assert isinstance(good, Done)
    assert isinstance(bad, Failed)
    assert kind in (None, type(world.error("bad")).__name__)


@pytest.mark.parametrize("data", [b"", b"GIF89a", png()[:200]])
def test_bad_picture(world, data):
    """A picture that cannot be decoded fails its request alone."""
    world.submit("bad", CaptionTask(), world.encoded(data))
    world.run("bad")
    assert type(world.error("bad")).__name__ == "ImageUndecodable"


def test_blob_of_a_stranger(world):
    """A blob outside of the namespace is an internal error, and is not opened."""
    other = BlobStore(new_namespace())
    ref = other.put(png())
    world.submit("bad", CaptionTask(), EncodedImage(blob=ref, mime_type="image/png"))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    other.close()


def test_bug_in_the_frontend_is_internal(assembly):
    """An exception nobody foresaw becomes InternalError without its text."""

    class Broken(GatedFrontend):
        def prepare_image(self, *arguments):
            raise ValueError("secret")

    world = World(dataclasses.replace(assembly, frontend=Broken(assembly.frontend)))
    world.submit("bad", CaptionTask(), world.encoded(png()))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    assert "secret" not in world.error("bad").message
    world.close()


class BlindFrontend(GatedFrontend):
    """A frontend that takes no pictures, and would wait for ever if it were given one."""

    takes_images = False

    def make_task(self, request):
        """Refuse what brings a picture."""
        if request.image is not None:
            raise TaskUnsupported("blind")
        return self._frontend.make_task(request)


def test_a_blind_model_is_spared_pictures(assembly):
    """No picture is prepared for a model that takes none: its frontend refuses the request."""
    frontend = BlindFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend))
    world.submit("bytes", CaptionTask(), world.encoded(png()))
    world.submit("named", CaptionTask(), CachedImage(image_id="any"))
    world.submit("text", QueryTask(question="hello"))
    held = hold(world, png())
    assert isinstance(world.run("text")[0], Done)
    assert isinstance(from_value(held.error), TaskUnsupported)
    assert isinstance(world.error("bytes"), TaskUnsupported)
    assert isinstance(world.error("named"), TaskUnsupported)
    assert not frontend.entered.is_set()
    world.close()


class WatchedFrontend(GatedFrontend):
    """A frontend that knows which of its pictures are still in memory."""

    def __init__(self, frontend):
        super().__init__(frontend)
        self.pictures = []
        self.gate.set()

    def prepare_image(self, *arguments):
        """Remember the picture without holding it."""
        image = super().prepare_image(*arguments)
        self.pictures.append(weakref.ref(image.pixels.pixels_NHWC))
        return image


@pytest.mark.parametrize("question", ["hello", "too long " * 2000], ids=["answered", "refused"])
def test_a_picture_goes_with_its_request(assembly, question):
    """Nothing but a cache holds a picture when its request has ended, not even as garbage."""
    frontend = WatchedFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend))
    gc.disable()
    try:
        world.submit("r", QueryTask(question=question), world.encoded(png()), cache_image=False)
        world.run("r")
        world.close()  # the threads that prepared it have ended, too
        assert [picture() for picture in frontend.pictures] == [None]
    finally:
        gc.enable()


def test_queued_is_told_once_to_those_that_wait(world):
    """Only requests that find no row free are told their place in the queue."""
    names = [f"r{i}" for i in range(7)]
    for name in names:
        world.submit(name, QueryTask(question="hello"))
    world.run(*names)
    assert world.of("r0", Queued) == []
    queued = [world.of(name, Queued) for name in names]
    assert [len(reports) for reports in queued[1:]] == [1] * 6
    assert [reports[0].position for reports in queued[1:]] == list(range(6))
    for name in names:
        assert isinstance(world.of(name)[-2], Delta | Started)


def test_full_queue(gated):
    """Requests over max_waiting are refused, those whose picture is being prepared included."""
    world, frontend = gated
    for i in range(CONFIG.max_waiting):
        world.submit(f"r{i}", CaptionTask(), world.encoded(png()))
    assert world.core.load().waiting == CONFIG.max_waiting
    world.submit("late", QueryTask(question="hello"))
    assert type(world.error("late")).__name__ == "QueueFull"
    assert int(world.error("late").metadata["retry_after_ms"]) > 0
    frontend.gate.set()
    for done in world.run(*(f"r{i}" for i in range(CONFIG.max_waiting))):
        assert isinstance(done, Done)


def test_a_tenants_share_counts_pictures_in_preparation(assembly):
    """QuotaExceeded comes before the picture is touched, and only to the tenant it is about."""
    frontend = GatedFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend), max_waiting_per_tenant=1)
    world.submit("a0", CaptionTask(), world.encoded(png()), tenant="a")
    world.submit("a1", CaptionTask(), world.encoded(png()), tenant="a")
    assert type(world.error("a1")).__name__ == "QuotaExceeded"
    world.submit("b0", CaptionTask(), world.encoded(png()), tenant="b")
    frontend.gate.set()
    assert all(isinstance(done, Done) for done in world.run("a0", "b0"))
    world.close()


def test_queued_tells_the_place_that_the_priority_gives(world):
    """A request of a higher priority is told of those before it only."""
    for name in ("r0", "r1", "r2", "r3", "r4"):
        world.submit(name, QueryTask(question="hello"))
    world.core.step()
    world.submit("low", QueryTask(question="hello"), priority=-1)
    world.submit("high", QueryTask(question="hello"), priority=100)
    world.run("low", "high")
    assert world.of("high", Queued)[0].position == 0
    assert world.of("low", Queued)[0].position > 0


def test_deadline_while_preparing(gated):
    """A request whose deadline passes while its picture is prepared fails at that time."""
    world, frontend = gated
    world.submit("r", CaptionTask(), world.encoded(png()), deadline=time.monotonic() + 0.01)
    frontend.entered.wait(10)
    assert world.core.next_deadline() < time.monotonic() + 1
    while not world.of("r", Failed):
        world.core.step()
    assert type(world.error("r")).__name__ == "DeadlineExceeded"
    frontend.gate.set()
    assert world.core.load().waiting == 0


def test_a_wrong_request_does_not_wait_for_its_picture(gated):
    """What can be said of a request without its picture is said at once."""
    world, frontend = gated
    world.submit("r", QueryTask(question="word " * 1000), world.encoded(png()))
    assert type(world.error("r")).__name__ == "PromptTooLong"
    assert world.core.load().waiting == 0
    frontend.gate.set()


def test_abort_while_preparing(gated):
    """A request aborted while its picture is prepared never starts."""
    world, frontend = gated
    world.submit("r", CaptionTask(), world.encoded(png()))
    frontend.entered.wait(10)
    world.core.abort("r")
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert world.of("r") == []


def test_stop_while_preparing(gated):
    """A request stopped while its picture is prepared tells its start and an empty result."""
    world, frontend = gated
    world.submit("r", DetectTask(object="cat"), world.encoded(png()))
    frontend.entered.wait(10)
    world.core.stop("r")
    world.core.stop("r")
    begun, done = world.of("r")
    assert isinstance(begun, Started)
    assert isinstance(done, Done)
    assert (done.result, done.finish_reason) == (DetectResult(), FinishReason.CANCELLED)
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert len(world.of("r")) == 2


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_after_any_step(assembly, num_steps, depth):
    """Stopped at any step, a request ends with what it had said until then, and holds nothing."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QueryTask(question="hello"))
    world.submit("r", QueryTask(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.stop("r")
    world.core.stop("r")
    reports = [report for report in world.of("r") if not isinstance(report, Queued)]
    begun, *deltas, done = reports
    assert isinstance(begun, Started)
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.CANCELLED
    said = "".join(event.text for report in deltas for event in report.events)
    assert isinstance(done.result, QueryResult)
    assert done.result.answer.startswith(said)
    assert 0 <= done.timings.first_token <= done.timings.total
    world.run("other")
    assert world.of("r")[-1] is done
    world.close()


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_after_any_step(assembly, num_steps, depth):
    """Abort at any step ends the reports and gives everything back; others are untouched."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QueryTask(question="hello"))
    world.submit("r", QueryTask(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.abort("r")
    world.core.abort("r")
    seen = len(world.of("r"))
    world.run("other")
    assert len(world.of("r")) == seen
    world.close()


def test_abort_of_unknown_and_ended(world):
    """Aborting what is not there does nothing."""
    world.core.abort("never")
    world.submit("r", QueryTask(question="hello"))
    world.run("r")
    world.core.abort("r")
    assert isinstance(world.of("r")[-1], Done)


@EITHER_KIND
def test_answers_do_not_depend_on_depth_or_order(assembly):
    """Blocking or pipelined, in any order of arrival, the prefix its own or another's: every
    request gets the same answer.
    """
    refs = (Point(x=0.25, y=0.5), Box(x_min=0.1, y_min=0.2, x_max=0.6, y_max=0.9))
    requests = {
        "q": (QueryTask(question="hello"), None),
        "t": (QueryTask(question="why?"), 0),
        "r": (QueryTask(question="why?", reasoning=True, spatial_refs=refs), 2),
        "c": (CaptionTask(), 1),
        "d": (DetectTask(object="cat", max_objects=4), 0),
        "p": (PointTask(object="dog", max_objects=4), 1),
        "s": (SegmentTask(object="dog"), 2),
    }
    answers: list[dict[str, TaskResult]] = []
    shared: list[set[str]] = []
    for depth in (1, 2, 2, 2):
        world = World(assembly, pipeline_depth=depth)
        order = random.Random(len(answers)).sample(sorted(requests), len(requests))
        for name in order:
            task, picture = requests[name]
            image = None if picture is None else world.encoded(png(picture))
            world.submit(name, task, image, sampling=SamplingParams(temperature=0.7, max_tokens=20))
            for _ in range(len(answers)):
                world.core.step()
        world.run(*requests)
        done = {name: world.of(name, Done)[0] for name in requests}
        answers.append({name: one.result for name, one in done.items()})
        shared.append({name for name, one in done.items() if one.usage.cached_tokens})
        world.close()
    assert all(answer == answers[0] for answer in answers)
    assert len(set.union(*shared)) > len(set.intersection(*shared))


def test_seed_comes_from_the_request_id(world):
    """A retried request id answers the same, another id may not, and a given seed wins."""
    warm = SamplingParams(temperature=1.0, max_tokens=24)
    world.submit("same", QueryTask(question="hello"), sampling=warm)
    (first,) = world.run("same")
    world.reports.clear()
    world.submit("same", QueryTask(question="hello"), sampling=warm)
    (second,) = world.run("same")
    assert first.result == second.result
    world.submit("other", QueryTask(question="hello"), sampling=warm)
    (third,) = world.run("other")
    assert third.result != first.result


def test_max_objects_ends_a_detection(world):
    """A detection ends for max_objects exactly when it has found that many."""
    world.submit("r", DetectTask(object="cat", max_objects=1), world.encoded(png()))
    (done,) = world.run("r")
    assert isinstance(done.result, DetectResult)
    assert (len(done.result.objects) == 1) == (done.finish_reason is FinishReason.MAX_OBJECTS)
