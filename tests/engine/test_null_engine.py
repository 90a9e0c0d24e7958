"""The engine without a model: its outputs, its process and its timeline."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import math
import os
import pathlib
import signal
import time
from contextlib import aclosing
from typing import Any

import pytest
from legato_engine.client.engine_client import EngineClient, EngineLimits
from legato_engine.config import EngineConfig
from legato_engine.errors import DeadlineExceeded
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    Failed,
    HoldImage,
    OutputDelta,
    PrefillStarted,
    QueuePosition,
    SchedulerLoad,
)
from legato_engine.null_engine import NullEngine
from legato_engine.shm import BlobReader, BlobStore, blob_folder, new_namespace
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    EncodedImage,
    FinishReason,
    ObjectEvent,
    ObjectOrder,
    PixelFormat,
    PointSpec,
    QuerySpec,
    RawImage,
    Request,
    RequestKey,
    Resumed,
    SamplingParams,
    SegmentSpec,
    TextEvent,
    Turn,
)
from PIL import Image

from tests.service.harness import until

# ---------------------------------------------------------------- engine
# The engine without a model: its outputs and its process.

HELLO = QuerySpec(question="hi")
TASKS = (
    QuerySpec(question="what is it"),
    QuerySpec(question="what is it", reasoning=True),
    CaptionSpec(),
    DetectSpec(object="cat"),
    PointSpec(object="cat"),
    SegmentSpec(object="cat"),
)


class Bench:
    """An engine, its outputs, and blobs that it can read."""

    def __init__(self, **settings):
        self.blobs = BlobStore(new_namespace())
        self.outputs: list[Any] = []
        config = EngineConfig(model="null", **settings)
        self.engine = NullEngine(
            config, blobs=BlobReader(self.blobs.namespace), send=self.outputs.append
        )

    def submit(self, name, task=HELLO, **fields):
        """Submit a request."""
        self.engine.submit(Request(request_id=RequestKey(name), task=task, **fields))

    def run(self, name="a", task=HELLO, **fields):
        """Run a request to its end; return its outputs."""
        self.submit(name, task, **fields)
        while self.engine.load() != SchedulerLoad(images_cached=self.engine.load().images_cached):
            self.engine.step()
        return self.of(name)

    def of(self, name):
        """Return the outputs of a request."""
        return [output for output in self.outputs if output.request_id.caller_id == name]

    def image(self, size=(30, 20), orientation=1):
        """Put a JPEG into a blob."""
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = io.BytesIO()
        Image.new("RGB", size, "red").save(data, "JPEG", exif=exif)
        return EncodedImage(blob=self.blobs.put(data.getvalue()), mime_type="image/jpeg")


@pytest.fixture
def bench():
    """An engine whose steps take no time."""
    return Bench()


def kinds(outputs):
    """Return the type names."""
    return [type(output).__name__ for output in outputs]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_every_token_is_a_delta_and_the_result_repeats_them(bench, task):
    """A request sends `PrefillStarted`, one `OutputDelta` per token and `Done`.

    Without deltas the result is the same.
    """
    started, *deltas, done = bench.run(task=task)
    assert isinstance(started, PrefillStarted)
    assert all(isinstance(delta, OutputDelta) and len(delta.events) == 1 for delta in deltas)
    assert len(deltas) == done.usage.output_tokens > 1
    assert done.finish_reason is FinishReason.STOP
    quiet_started, quiet = bench.run("b", task, deltas=False)
    assert isinstance(quiet_started, PrefillStarted)
    (silent,) = bench.run("c", task, deltas=False, progress=False)
    assert silent.result == quiet.result == done.result


def test_text_has_as_many_words_as_asked_for(bench):
    """`max_tokens` words end with LENGTH; a stop string cuts the text before it."""
    *_, done = bench.run(sampling=SamplingParams(max_tokens=40), deltas=False)
    assert len(done.result.answer.split()) == 40
    assert done.finish_reason is FinishReason.LENGTH
    *_, cut = bench.run("b", sampling=SamplingParams(stop=("picture",)), deltas=False)
    assert done.result.answer.startswith(cut.result.answer)
    assert done.result.answer[len(cut.result.answer) :].startswith("picture")
    assert cut.finish_reason is FinishReason.STOP


def test_a_conversation_is_counted_whole(bench):
    """Every word of the conversation counts as a token."""
    turn = Turn(question="what is it", answer="a cup")
    alone, talk = (
        bench.run(name, QuerySpec(question="what colour", system=system, history=history))[-1]
        for name, system, history in (("a", "", ()), ("b", "be short", (turn,)))
    )
    assert talk.usage.input_tokens - alone.usage.input_tokens == 7


def test_tokens_are_optional(bench):
    """With `return_tokens` each delta has its token and `Done` has all; without it, none has."""
    *deltas, done = bench.run(return_tokens=True)[1:]
    told = [delta.events[0] for delta in deltas]
    assert all(event.tokens[0].text == event.text for event in told)
    assert done.tokens == tuple(event.tokens[0] for event in told)
    assert all(token.logprob is None for token in done.tokens)
    *deltas, done = bench.run("b")[1:]
    assert all(not delta.events[0].tokens for delta in deltas)
    assert done.tokens == ()


def test_tokens_of_objects_have_events_of_their_own(bench):
    """Tokens of objects come in events of their own, with a logprob of 0 if wanted."""
    task = DetectSpec(object="cat")
    *deltas, done = bench.run(task=task, return_tokens=True, logprobs=True)[1:]
    for index, delta in enumerate(deltas):
        tokens, found = delta.events
        assert tokens.tokens == (done.tokens[index],)
        assert isinstance(found, ObjectEvent)
    assert [token.logprob for token in done.tokens] == [0.0] * len(deltas)


@pytest.mark.parametrize(
    ("max_objects", "found", "reason"),
    [(None, 5, FinishReason.STOP), (2, 2, FinishReason.MAX_OBJECTS), (9, 5, FinishReason.STOP)],
)
def test_objects_are_bounded_by_max_objects(max_objects, found, reason):
    """The number of objects is the smaller of `null_objects` and `max_objects`."""
    *_, done = Bench(null_objects=5).run(task=DetectSpec(object="cat", max_objects=max_objects))
    assert len({(each.box.x_min, each.box.y_min) for each in done.result.objects}) == found
    assert done.finish_reason is reason


@pytest.mark.parametrize("task", [DetectSpec, PointSpec])
def test_objects_have_confidences(task):
    """They filter before `max_objects` counts, and order the result; events keep their order."""
    bench = Bench(null_objects=5)
    asked = task(object="cat", min_confidence=0.5, max_objects=3, order=ObjectOrder.CONFIDENCE)
    *deltas, done = bench.run(task=asked, deltas=True)[1:]
    told = [delta.events[0].confidence for delta in deltas]
    found = done.result.objects if task is DetectSpec else done.result.points
    assert told == [0.75, 0.9375, 0.8125]
    assert [each.confidence for each in found] == sorted(told, reverse=True)
    assert done.finish_reason is FinishReason.MAX_OBJECTS


def test_images_are_read_sized_and_cached(bench):
    """The blob is removed, the size is the displayed one, and the same bytes or id are hits."""
    source = bench.image((30, 20), orientation=6)
    first = bench.run("a", CaptionSpec(), image=source)[-1]
    assert not (blob_folder() / source.blob.name).exists()
    assert (first.image.width, first.image.height, first.image.cache_hit) == (20, 30, False)
    again = bench.run("b", CaptionSpec(), image=bench.image((30, 20), orientation=6))[-1]
    named = bench.run("c", CaptionSpec(), image=CachedImageRef(image_id=first.image.image_id))[-1]
    assert again.image == named.image
    assert again.image.cache_hit
    assert again.image.image_id == first.image.image_id
    assert again.usage.cached_tokens > first.usage.cached_tokens == 0


def test_an_image_is_kept_only_with_cache_image(bench):
    """Without `cache_image` the id is unknown."""
    raw = RawImage(
        blob=bench.blobs.put(bytes(24)), width=4, height=2, row_stride=12, format=PixelFormat.RGB8
    )
    done = bench.run("a", CaptionSpec(), image=raw, cache_image=False)[-1]
    assert (done.image.width, done.image.height) == (4, 2)
    (failed,) = bench.run("b", CaptionSpec(), image=CachedImageRef(image_id=done.image.image_id))
    assert failed.error.kind == "ImageNotFound"


def test_an_invalid_request_fails_alone(bench):
    """An unknown model, an adapter and a broken image fail only their requests."""
    assert bench.run("a", model="other")[0].error.kind == "ModelNotFound"
    assert bench.run("b", adapter="x")[0].error.kind == "AdapterNotFound"
    broken = EncodedImage(blob=bench.blobs.put(b"no picture"), mime_type="image/png")
    assert bench.run("c", CaptionSpec(), image=broken)[0].error.kind == "ImageUndecodable"
    assert isinstance(bench.run("d")[-1], Done)


def test_a_checkpoint_goes_on_and_one_of_other_tokens_is_refused(bench):
    """After any token the rest is the same; a token's id is its number."""
    whole = bench.run(deltas=True)
    count = len([each for each in whole if isinstance(each, OutputDelta)])
    for told in (1, count):
        resumed = Resumed(arrival=1.0, token_ids=tuple(range(told)), admitted=False)
        rest = bench.run("b", resumed=resumed)
        assert [each.events for each in rest[1:-1]] == [
            each.events for each in whole[told + 1 : -1]
        ]
        assert rest[-1].result == whole[-1].result
        bench.outputs.clear()
    for ids in ((1,), tuple(range(count + 1))):
        bench.submit("c", resumed=Resumed(arrival=1.0, token_ids=ids, admitted=False))
        (failed,) = bench.of("c")
        assert failed.error.metadata["field"] == f"resume_from.token_ids[{len(ids) - 1}]"
        bench.outputs.clear()


def test_paced_requests_wait():
    """`max_running` run, `max_waiting` wait, the next is refused; requests end in order."""
    bench = Bench(null_step_ms=0.01, max_running=1, max_waiting=1)
    for name in ("a", "b", "c"):
        bench.submit(name)
    (refused,) = bench.of("c")
    assert refused.error.kind == "QueueFull"
    assert bench.engine.estimated_wait() == 0, "no request has ended yet"
    bench.run("d", model="other")
    assert kinds(bench.of("b"))[:2] == ["QueuePosition", "PrefillStarted"]
    ends = [output.request_id.caller_id for output in bench.outputs if isinstance(output, Done)]
    assert ends == ["a", "b"]
    assert isinstance(bench.of("b")[0], QueuePosition)
    bench.submit("e")
    bench.submit("f")
    assert bench.engine.estimated_wait() > 0


def test_pacing_waits_between_tokens():
    """Between steps the engine is idle and has a deadline for the next one."""
    bench = Bench(null_step_ms=3_600_000)
    bench.submit("a")
    bench.engine.step()
    assert kinds(bench.of("a")) == ["PrefillStarted"]
    assert not bench.engine.busy
    assert time.monotonic() < bench.engine.next_deadline() < math.inf


@pytest.mark.parametrize("running", [True, False])
def test_a_stop_gives_the_partial_result(running):
    """A stopped request sends `PrefillStarted` once, then `Done` with its partial result."""
    bench = Bench(null_step_ms=0.01, max_running=1)
    bench.submit("other")
    while len(bench.of("other")) < 4:
        bench.engine.step()
    bench.submit("waiting")
    name = "other" if running else "waiting"
    bench.engine.stop(RequestKey(name))
    bench.engine.stop(RequestKey(name))
    told: list[Any] = bench.of(name)
    assert kinds(told).count("PrefillStarted") == 1
    assert kinds(told)[-1] == "Done"
    assert told[-1].finish_reason is FinishReason.CANCELLED
    assert told[-1].usage.output_tokens == kinds(told).count("OutputDelta")
    assert bool(told[-1].result.answer) is running


def test_an_abort_is_silent_and_a_deadline_is_not():
    """An aborted request sends nothing more; one past its deadline fails, running or waiting."""
    bench = Bench(null_step_ms=3_600_000, max_running=2)
    bench.submit("aborted")
    bench.submit("late", deadline=time.monotonic())
    bench.submit("waiting", deadline=time.monotonic())
    bench.engine.abort(RequestKey("aborted"))
    told = len(bench.of("aborted"))
    bench.engine.step()
    assert len(bench.of("aborted")) == told
    for name in ("late", "waiting"):
        last = bench.of(name)[-1]
        assert isinstance(last, Failed)
        assert last.error.kind == DeadlineExceeded.__name__
    assert bench.engine.load() == SchedulerLoad()
    assert bench.engine.next_deadline() == math.inf


def mapped_files(pid):
    """Return the files that a process has mapped."""
    return pathlib.Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.usefixtures("child_python_path")
@pytest.mark.real_start  # a forked process has what forked it mapped
async def test_the_process_serves_without_a_model():
    """The engine process maps no torch, and serves streams and images over the real transport."""
    client = EngineClient(EngineConfig(model="null", heartbeat_interval=0.05))
    await client.start()
    try:
        await client.wait_ready()
        assert client.model is not None
        assert client.model.name == "null"
        assert client._process is not None
        assert "libtorch" not in mapped_files(client._process.pid)
        data = io.BytesIO()
        Image.new("RGB", (8, 6)).save(data, "PNG")
        image = EncodedImage(blob=client.blobs.put(data.getvalue()), mime_type="image/png")
        detect = Request(request_id=RequestKey("a"), task=DetectSpec(object="cat"), image=image)
        outputs: list[Any] = [output async for output in client.submit(detect)]
        assert isinstance(outputs[0], PrefillStarted)
        assert isinstance(outputs[-1], Done)
        result: Any = outputs[-1].result
        events = [e for r in outputs[1:-1] for e in r.events]
        assert tuple(events) == result.objects
        assert all(isinstance(event, ObjectEvent) for event in events)
        await _until(lambda: client.load == SchedulerLoad(images_cached=1))
        assert len(client.blobs) == 0
    finally:
        await client.close()


@pytest.mark.usefixtures("child_python_path")
async def test_the_process_paces_and_stops():
    """A paced request runs until it is stopped, and then sends its partial result."""
    client = EngineClient(EngineConfig(model="null", heartbeat_interval=0.05, null_step_ms=5))
    await client.start()
    try:
        await client.wait_ready()
        endless = SamplingParams(max_tokens=7000)
        stream = client.submit(Request(request_id=RequestKey("a"), task=HELLO, sampling=endless))
        assert isinstance(await stream.__anext__(), PrefillStarted)
        first: Any = await stream.__anext__()
        assert isinstance(first.events[0], TextEvent)
        stream.stop()
        last: Any = [output async for output in stream][-1]
        assert last.finish_reason is FinishReason.CANCELLED
        assert 0 < last.usage.output_tokens < 7000
    finally:
        await client.close()


async def _until(condition):
    while not condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(0.01)


def test_images_are_leased_and_dropped():
    """A leased image is found by its id, counts against its owner, and can be dropped."""
    bench = Bench(image_quota_bytes=40 * 30 * 3)

    def hold(name, size, ttl=9.0, **fields):
        image = bench.image(size)
        bench.engine.hold(
            HoldImage(request_id=RequestKey(name), image=image, owner="me", ttl=ttl, **fields)
        )
        return bench.outputs[-1]

    held = hold("h", (40, 30))
    assert (held.image.width, held.image.height) == (40, 30)
    assert bench.engine.next_deadline() == held.until
    assert hold("again", (40, 30)).image.cache_hit
    assert hold("more", (41, 30)).error.kind == "BytesExceeded"
    assert hold("hash", (2, 2), sha256="0" * 64).error.metadata["field"] == "sha256"
    *_, answered = bench.run(image=CachedImageRef(image_id=held.image.image_id))
    assert answered.image.cache_hit
    for name, kind in (("d", "ImageDropped"), ("e", "Failed")):
        bench.engine.drop(
            DropImage(request_id=RequestKey(name), image_id=held.image.image_id, owner="me")
        )
        assert type(bench.outputs[-1]).__name__ == kind
    over = hold("short", (30, 30), ttl=0.0).image.image_id
    *_, failed = bench.run(image=CachedImageRef(image_id=over))
    assert failed.error.kind == "ImageNotFound"
    bench.blobs.close()


# ---------------------------------------------------------------- timeline
# The timeline of a null engine's process, which has the host's commits alone.

CONFIG = EngineConfig(model="null", heartbeat_interval=0.05, null_step_ms=2)


@contextlib.asynccontextmanager
async def running():
    """A ready client of an engine that answers requests one after the other."""
    client = EngineClient(CONFIG, limits=EngineLimits(backoff_first=0.05))
    await client.start()
    try:
        await client.wait_ready()
        asking = asyncio.create_task(ask(client))
        yield client
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    finally:
        await client.close()


async def ask(client):
    """Submit requests without an end; they outlive an engine."""
    for number in itertools.count():
        request = Request(
            request_id=RequestKey(f"r{number}"),
            task=QuerySpec(question="what is it?"),
            sampling=SamplingParams(max_tokens=40),
        )
        await client.submit(request, may_wait=True).done()


async def read(batches, count):
    """Return what the next batches with spans say."""
    found: list[Any] = []
    while len(found) < count:
        found.append(await anext(batches))
    return found


@pytest.mark.usefixtures("child_python_path")
async def test_what_a_real_engine_tells_its_watchers():
    """Two watchers share an engine's batches, and nothing comes after the last has left.

    Those of another engine continue with a start of their own.
    """
    async with asyncio.timeout(100), running() as client:
        one, two = client.timeline.batches(), client.timeline.batches()
        async with aclosing(one), aclosing(two):
            first, second = await asyncio.gather(read(one, 3), read(two, 3))
            shared = {id(each.batch) for each in first} & {id(each.batch) for each in second}
            assert len(shared) >= 2
            assert {each.lost for each in (*first, *second)} == {0}
            spans = [span for each in first for span in each.batch.spans]
            launches = [span.launch for span in spans]
            assert launches == list(range(launches[0], launches[0] + len(launches)))
            assert {(span.lane, span.rows, span.tokens) for span in spans} == {("cpu commit", 1, 1)}

            started = first[0].batch.started
            os.kill(client.pid, signal.SIGKILL)
            while (after := await anext(one)).batch.started == started:
                pass
            assert after.lost == 0
            assert after.batch.spans[0].launch < launches[-1]

        arrived: list[Any] = []
        client.timeline.deliver = arrived.append
        step = client.step
        await until(lambda: client.step > step + 100)  # some heartbeats and periods later
        left = len(arrived)  # what was on its way
        await until(lambda: client.step > step + 250)
        assert len(arrived) == left
