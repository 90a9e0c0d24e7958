"""A server with several engines: the devices, the choice of an engine and what engines hold."""

import asyncio
import collections
import os
import random

import msgspec
import pytest
from legato.v1 import admin_pb2, image_pb2, inference_pb2, media_pb2, server_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.config import EngineConfig
from legato_engine.errors import EngineLost, ImageNotFound, InvalidField
from legato_engine.ipc.messages import DropImage, HoldImage, SchedulerLoad, TimelineBatch
from legato_engine.types import CachedImageRef, CaptionSpec, QuerySpec, Request, RequestKey
from legato_service import arguments
from legato_service.engines.devices import engine_configs, parse_devices
from legato_service.engines.group import MAX_LEAD, Candidate, Directory, EngineGroup, choose
from legato_service.images.intake import as_source
from legato_service.requests.dispatcher import bytes_key, keys_of

from tests.service.fakes import FakeEngine, begin
from tests.service.harness import image_bytes, image_message, refusal, running, until

# ---------------------------------------------------------------- group

QUESTION = inference_pb2.QueryRequest(question="what?")


@pytest.fixture
def engines():
    return FakeEngine(), FakeEngine(number=1)


@pytest.fixture
def group(engines):
    return EngineGroup(engines)


def detect(image):
    return inference_pb2.DetectRequest(image=image, object="cup")


def image(size):
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=image_bytes(size=size)))


def counts(engines):
    return [len(each.requests) for each in engines]


def hold_of(blobs, data=b"image"):
    return HoldImage(
        request_id=RequestKey("hold"),
        image=as_source("image/png", blobs.put(data)),
        owner="me",
        ttl=60.0,
    )


async def test_new_requests_are_shared(engines):
    """Idle engines take turns; a busy one gets less."""
    async with running(engines) as server:
        for number in range(6):
            await server.inference.Detect(detect(image((8, 6 + number))))
        assert counts(engines) == [3, 3]
        engines[0].estimated_wait = 1.0
        for _ in range(4):
            await server.inference.Query(QUESTION)
        assert counts(engines) == [3, 7]


async def test_the_engine_that_is_next_is_told_to_expect_a_request(engines, group):
    """A lone request finds it awake; while others are open none is expected."""
    for _ in range(3):
        before = [each.expected for each in engines]
        group.expect()
        woken = next(
            each for each, count in zip(engines, before, strict=True) if each.expected > count
        )
        assert group.route() is woken
    engines[0].script = begin
    engines[0].submit(Request(request_id=RequestKey("a"), task=CaptionSpec()))
    before = [each.expected for each in engines]
    group.expect()
    assert [each.expected for each in engines] == before


async def test_an_image_goes_where_it_was(engines):
    """By its bytes and by its id."""
    async with running(engines) as server:
        for _ in range(4):
            found = await server.inference.Detect(detect(image_message()))
        assert sorted(counts(engines)) == [0, 4]
        named = media_pb2.Image(image_id=found.info.image.image_id)
        for _ in range(4):
            await server.inference.Detect(detect(named))
        assert sorted(counts(engines)) == [0, 8]


async def test_without_affinity_images_are_shared(engines):
    """A switch to measure what it gains."""
    async with running(engines, affinity=False) as server:
        for _ in range(4):
            await server.inference.Detect(detect(image_message()))
    assert counts(engines) == [2, 2]


async def test_an_image_id_goes_to_its_holder_however_long_it_waits(engines):
    """No other engine has it."""
    async with running(engines) as server:
        found = await server.inference.Detect(detect(image_message()))
        holder = next(each for each in engines if each.requests)
        holder.estimated_wait = 30.0
        named = media_pb2.Image(image_id=found.info.image.image_id)
        await server.inference.Detect(detect(named))
        assert len(holder.requests) == 2
        await server.inference.Detect(detect(image_message()))  # with bytes it need not wait
        assert len(holder.requests) == 2


async def test_one_engine_is_enough_to_serve(engines):
    """Health, limits and the load follow the engines that serve."""
    async with running(engines) as server:
        both = (await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())).limits
        engines[0].become(EngineState.LOST)
        one = (await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())).limits
        assert (both.max_running, both.max_waiting) == (2 * one.max_running, 2 * one.max_waiting)
        for _ in range(3):
            await server.inference.Query(QUESTION)
        assert counts(engines) == [0, 3]
        load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.engine_state == "serving"
        assert [each.state for each in load.engines] == ["lost", "serving"]
        engines[1].become(EngineState.LOST)
        assert (await refusal(server.inference.Query(QUESTION))).reason == "ENGINE_LOST"
        load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.engine_state == "lost"


async def test_loads_add_up(engines):
    """GetLoad has the sums and each engine's own figures."""
    engines[0].load = SchedulerLoad(running=3, waiting=1, pages_used=10, pages_total=20)
    engines[1].load = SchedulerLoad(running=2, waiting=0, pages_used=2, pages_total=20)
    engines[0].estimated_wait, engines[0].step, engines[1].step = 0.5, 7, 5
    async with running(engines) as server:
        load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
    assert (load.running, load.waiting, load.engine_step) == (5, 1, 12)
    assert load.kv_used_ratio == pytest.approx(0.3)
    assert load.estimated_wait.ToTimedelta().total_seconds() == 0
    assert [(each.running, each.waiting) for each in load.engines] == [(3, 1), (2, 0)]
    assert load.engines[0].estimated_wait.ToTimedelta().total_seconds() == 0.5


def test_the_capacity_is_that_of_the_serving_engines(engines, group):
    """Admission follows it."""
    both = group.capacity
    engines[1].become(EngineState.LOST)
    assert group.capacity == both / 2
    engines[0].become(EngineState.LOST)
    assert group.capacity == both  # their requests are refused by the state


def test_the_state_is_that_of_the_best_engine(engines, group):
    """A group that starts or has lost all says so."""
    seen: list[EngineState] = []
    group.subscribe(seen.append)
    engines[0].become(EngineState.LOST)
    engines[1].become(EngineState.HUNG)
    engines[1].become(EngineState.LOST)
    engines[0].become(EngineState.STARTING)
    engines[0].become(EngineState.READY)
    states = EngineState
    assert seen == [states.READY, states.HUNG, states.LOST, states.STARTING, states.READY]


async def test_a_hold_is_made_once_more(engines, group):
    """With another engine when the first is lost meanwhile; not with a third."""
    for each in engines:
        each.may_answer.clear()
        each.refuses_holds = EngineLost("died")
    first, second = sorted(engines, key=lambda each: each is not group.route())
    group.route()
    holding = asyncio.create_task(group.hold(hold_of))
    await until(lambda: bool(first.holds))
    first.become(EngineState.LOST)
    first.may_answer.set()
    await until(lambda: bool(second.holds))
    second.refuses_holds = None
    second.may_answer.set()
    assert (await holding)[0] is second
    second.refuses_holds = EngineLost("died")
    with pytest.raises(EngineLost):
        await group.hold(hold_of)


async def test_a_drop_reaches_every_hold(engines, group):
    """An owner may hold an image at several engines; one that is held nowhere is not found."""
    for each in engines:
        await each.hold(hold_of(each.blobs))
    name = next(iter(engines[0].held))[1]
    command = DropImage(request_id=RequestKey("drop"), image_id=name, owner="me")
    await group.drop(command)
    assert not engines[0].held
    assert not engines[1].held
    with pytest.raises(ImageNotFound):
        await group.drop(command)
    await engines[1].hold(hold_of(engines[1].blobs))
    await group.drop(command)


async def test_uploads_of_a_lost_engine_are_held_by_another(engines):
    """At once, and requests that name one go there."""
    data = image_bytes()
    pieces = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(mime_type="image/png")),
        image_pb2.PutImageRequest(chunk=data),
    ]
    async with running(engines) as server:
        held = (await server.images.PutImage(iter(pieces))).image
        holder, other = sorted(engines, key=lambda each: not each.holds)
        assert not other.holds
        named = detect(media_pb2.Image(image_id=held.image_id))
        for _ in range(3):
            await server.inference.Detect(named)
        assert (len(holder.requests), len(other.requests)) == (3, 0)
        holder.become(EngineState.LOST)
        await until(lambda: bool(other.held))
        await server.inference.Detect(named)
        assert isinstance(other.requests[0].image, CachedImageRef)
        await server.images.DeleteImage(image_pb2.DeleteImageRequest(image_id=held.image_id))
        assert not other.held


async def test_an_image_that_one_engine_lacks_is_sought_at_the_others(engines, group):
    """Another process may have had it computed there; each engine is asked once."""
    for each in engines:
        each.script = begin
    request = Request(
        request_id=RequestKey("a"),
        task=QuerySpec(question="?"),
        image=CachedImageRef(image_id="img_0"),
    )
    stream = engines[0].submit(request)
    stream.searched = (0,)
    assert group.find_image(stream)
    assert engines[1].requests == [request]
    stream.searched = (0, 1)
    assert not group.find_image(stream)


async def test_a_query_of_new_and_held_images_finds_the_held_one(engines):
    """At the engine that holds it, wherever it stands in the query."""
    for each in engines:
        each.model = msgspec.structs.replace(each.model, max_images=2)
    data = image_bytes()
    pieces = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(mime_type="image/png")),
        image_pb2.PutImageRequest(chunk=data),
    ]
    async with running(engines) as server:
        name = (await server.images.PutImage(iter(pieces))).image.image_id
        holder, other = sorted(engines, key=lambda each: not each.holds)
        images = [
            task_pb2.QueryImage(image=image((33, 21))),
            task_pb2.QueryImage(image=media_pb2.Image(image_id=name)),
        ]
        for given in (images, images[::-1]) * 2:
            await server.inference.Query(inference_pb2.QueryRequest(question="?", images=given))
        assert (len(holder.requests), len(other.requests)) == (4, 0)


async def test_new_images_go_along_to_the_engine_that_holds_another(engines, group):
    """After one that lacked it; there they are staged anew."""
    for each in engines:
        each.script = begin
    named = CachedImageRef(image_id="img_0")

    def restage(blobs):
        return [as_source("image/png", blobs.put(b"image")), named]

    request = Request(request_id=RequestKey("a"), task=QuerySpec(question="?"))
    stream = engines[0].submit(request.with_images(restage(engines[0].blobs)), restage)
    stream.searched = (0,)
    assert group.find_image(stream)
    new, held = engines[1].requests[0].images
    assert new.blob.name.startswith(engines[1].blobs.namespace)
    assert held == named
    for each in engines:
        each.blobs.close()


async def test_requests_that_wait_go_on_where_there_is_least_to_do(engines, group):
    """If an engine serves; the image is staged in its store."""
    for each in engines:
        each.script = begin
    engines[1].estimated_wait = 1.0
    request = Request(request_id=RequestKey("a"), task=QuerySpec(question="?"))

    def restage(blobs):
        return [as_source("image/png", blobs.put(b"image"))]

    stream = engines[1].submit(request, restage)
    assert group.take_over(stream)
    assert engines[0].requests[0].image.blob.name.startswith(engines[0].blobs.namespace)
    for each in engines:
        each.become(EngineState.STARTING)
    assert not group.take_over(stream)
    for each in engines:
        each.blobs.close()


async def test_each_engines_timeline_is_told_apart(engines):
    """Batches carry the engine, and the watch ends for both."""
    async with running(engines) as server:
        watch = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        await watch.read()
        await until(lambda: all(each.watched == [True] for each in engines))
        told = set()
        for each in engines:
            each.timeline.deliver(TimelineBatch(spans=()))
            told.add((await watch.read()).engine)
        assert told == {0, 1}
        watch.cancel()
        await until(lambda: all(each.watched == [True, False] for each in engines))


def request_for(task, part="", adapter="", **settings):
    key = RequestKey("call", "tenant", part)
    return Request(request_id=key, task=task, adapter=adapter, **settings)


def test_what_a_request_needs():
    """Most valuable first: image or prefix, its call's other parts, its adapter."""
    short, long = QuerySpec(question="?"), QuerySpec(question="?" * 300)
    named = CachedImageRef(image_id="img_0")
    kinds = [key[0] for key in keys_of(request_for(short, "1", "cups"), named)]
    assert kinds == ["image", "call", "adapter"]
    assert not [*keys_of(request_for(short), None)]
    assert [key[0] for key in keys_of(request_for(long), None)] == ["prefix"]
    other = request_for(long, adapter="cups")
    assert next(keys_of(other, None)) != next(keys_of(request_for(long), None))


def test_images_look_alike_only_within_a_tenant():
    """By size and some of their bytes."""
    data = bytes(range(256)) * 16
    assert bytes_key("a", data) == bytes_key("a", memoryview(data))
    assert bytes_key("a", data) != bytes_key("b", data)
    assert bytes_key("a", data) != bytes_key("a", data + b"x")
    assert bytes_key("a", data) != bytes_key("a", data[:-1] + b"x")


# ---------------------------------------------------------------- routing

RECOMPUTING = 0.1  # seconds


def chosen(*candidates, turn=0):
    return choose(candidates, turn, RECOMPUTING).number


@pytest.mark.parametrize("turn", range(3))
def test_the_shortest_wait_is_chosen(turn):
    """Whichever turn it is, by the predicted wait and what it has not seen yet."""
    assert chosen(Candidate(0, wait=0.3), Candidate(1, wait=0.2), turn=turn) == 1
    assert chosen(Candidate(0, load=1.0), Candidate(1, load=0.5), turn=turn) == 1
    assert chosen(Candidate(0, 0.1, 1.0), Candidate(1, 0.9, 0.1), turn=turn) == 1


def test_equal_engines_take_turns():
    """Idle engines get as many requests, by number whatever the order of the candidates."""
    idle = (Candidate(0), Candidate(2), Candidate(5))
    assert collections.Counter(chosen(*idle, turn=turn) for turn in range(9)) == {0: 3, 2: 3, 5: 3}


def test_a_holder_is_preferred_while_its_lead_is_small():
    """Up to the time that the others would compute, and to a share of its rows."""
    idle = Candidate(0)
    assert chosen(idle, Candidate(1, wait=RECOMPUTING, holds=True)) == 1
    assert chosen(idle, Candidate(1, wait=RECOMPUTING + 0.01, holds=True)) == 0
    assert chosen(idle, Candidate(1, load=MAX_LEAD, holds=True)) == 1
    assert chosen(idle, Candidate(1, load=MAX_LEAD + 0.01, holds=True)) == 0


def test_of_several_holders_the_least_loaded_is_chosen():
    """An engine that holds nothing is not, though it has less to do."""
    busy, less, idle = Candidate(0, load=0.4, holds=True), Candidate(1, load=0.2, holds=True), 2
    assert chosen(busy, less, Candidate(idle)) == 1


def test_a_full_holder_is_passed_over():
    """Its queue would refuse what another one takes."""
    assert chosen(Candidate(0), Candidate(1, holds=True, is_full=True)) == 0


def test_one_hot_image_does_not_overload_its_holder():
    """Whatever is asked for, no engine's lead exceeds the bound and the request itself."""
    chance, rows = random.Random(7), 16
    open_requests = [0, 0, 0]
    for turn in range(3000):
        candidates = [
            Candidate(number, load=count / rows, holds=number == 0)
            for number, count in enumerate(open_requests)
        ]
        open_requests[choose(candidates, turn, RECOMPUTING).number] += 1
        assert max(open_requests) - min(open_requests) <= MAX_LEAD * rows + 1
        if sum(open_requests) > 60:
            busy = [number for number, count in enumerate(open_requests) if count]
            open_requests[chance.choice(busy)] -= 1
            least = min(open_requests)
            open_requests = [min(count, least + 8) for count in open_requests]


# ---------------------------------------------------------------- directory

A, B = ("a",), ("b",)


def test_a_key_has_the_engines_that_were_noted():
    """Several may hold one, and a key without any is left out."""
    directory = Directory()
    directory.note((A, B), 0)
    directory.note((A,), 3)
    assert list(directory.holders((("none",), B, A))) == [{0}, {0, 3}]


def test_a_lost_engine_holds_nothing():
    """Keys that no engine holds any more are gone."""
    directory = Directory()
    directory.note((A, B), 0)
    directory.note((A,), 1)
    directory.forget(0)
    assert list(directory.holders((A, B))) == [{1}]
    assert len(directory) == 1


def test_the_least_recently_noted_are_dropped():
    """The memory of a process that sees new images all day stays bounded."""
    directory = Directory(max_keys=2)
    for key in ("a", "b", "a", "c"):
        directory.note(((key,),), 1)
    assert list(directory.holders((A, B, ("c",)))) == [{1}, {1}]
    assert len(directory) == 2


# ---------------------------------------------------------------- devices
# The devices that an operator names.


def test_names_of_devices():
    """GPUs by number, and the CPU as often as one likes."""
    assert parse_devices("cuda:0,cuda:1") == ("cuda:0", "cuda:1")
    assert parse_devices("cpu,cpu") == ("cpu", "cpu")
    assert parse_devices("cuda,cuda:3") == ("cuda:0", "cuda:3")
    assert parse_devices("all", count=lambda: 3) == ("cuda:0", "cuda:1", "cuda:2")


@pytest.mark.parametrize("text", ["gpu0", "cuda:", "cuda:-1", "cuda:0,", "cuda:0,cuda:0", "auto"])
def test_what_is_no_device_is_refused(text):
    """The field is named."""
    with pytest.raises(InvalidField) as raised:
        parse_devices(text)
    assert raised.value.metadata["field"] == "devices"


def test_all_without_a_gpu_is_refused():
    """A server that should use GPUs does not fall back to the CPU."""
    with pytest.raises(InvalidField, match="no CUDA GPU"):
        parse_devices("all", count=lambda: 0)


def test_each_engine_has_its_device():
    """Engines on the CPU share its cores, unless the operator divided them."""
    cores = len(os.sched_getaffinity(0))
    config = EngineConfig(max_running=3)
    assert engine_configs(config, ()) == (config,)
    one, other = engine_configs(config, ("cpu", "cpu"))
    assert one == other == EngineConfig(max_running=3, device="cpu", threads=max(1, cores // 2))
    assert [each.threads for each in engine_configs(EngineConfig(threads=5), ("cpu", "cpu"))] == [
        5,
        5,
    ]
    gpus = engine_configs(config, ("cuda:0", "cuda:1"))
    assert [(each.device, each.threads) for each in gpus] == [("cuda:0", 0), ("cuda:1", 0)]


def test_the_options(capsys):
    """Both forms together are an error."""
    assert arguments.parse(["--devices", "cpu,cpu"]).devices == "cpu,cpu"
    assert arguments.parse([]).affinity
    assert not arguments.parse(["--affinity", "off"]).affinity
    with pytest.raises(SystemExit):
        arguments.parse(["--devices", "cpu,cpu", "--device", "cpu"])
    assert "not allowed with" in capsys.readouterr().err
