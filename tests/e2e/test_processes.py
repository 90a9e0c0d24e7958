"""Several service processes, several engines and many clients."""

import asyncio
import collections
import contextlib
import functools
import itertools
import os
import random
import signal
import threading

import grpc
import pytest
from legato.v1 import (
    image_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    task_pb2,
)
from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    Finished,
    Options,
    QueryTask,
    Sampling,
)
from legato_engine.ipc import latency_policy

from tests.e2e.history import WILD, ask, ask_async, jobs
from tests.e2e.scenes import long_query, two_shapes
from tests.e2e.server import Server, children, failure_of, open_files, own_bytes, policies, until
from tests.e2e.test_engine_loss import DEADLY, FAILPOINT, QUICK
from tests.service.harness import image_bytes

CONNECTIONS = 16  # that all of them go to one of two processes is as good as impossible
SCENE = two_shapes()
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A server of two processes; every test leaves it idle."""
    with Server(tmp_path_factory.mktemp("pair"), "--processes", "2") as running:
        yield running
        running.settle()


@pytest.fixture
def inferences(pair):
    """Stubs on connections of their own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    channels = [grpc.insecure_channel(pair.address, options) for _ in range(CONNECTIONS)]
    yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    for channel in channels:
        channel.close()


def test_both_processes_answer_alike(pair, alone):
    """Whichever process is asked, the answers are those of a server of one, sampling included."""
    asked = list(zip(jobs(), alone, strict=True))
    for job, expected in (*asked[:7], *asked[-3:]):  # every skill, and text
        with Client(pair.address) as client:
            assert ask(client, job) == expected
    pair.settle()


def test_only_the_engine_takes_a_core_from_others(pair):
    """On few cores every thread of the service waits for its turn; none of the engine's does."""
    (follower,) = pair.worker_pids()
    (engine,) = set(children(pair.process.pid)) - {follower}
    expected = latency_policy.resolve("auto").service_scheduler
    for pid in (pair.process.pid, follower):
        assert policies(pid) == {expected}
    assert policies(engine) == {os.SCHED_OTHER}


def answers(server):
    """The test's own connection may be to a killed process, and breaks at its first call."""
    try:
        return server.is_serving()
    except grpc.RpcError:
        return False


def test_a_killed_process_leaves_nothing(pair, inferences):
    """The engine forgets what a killed process had asked, and another one takes its place."""
    first = pair.worker_pids()
    calls = [inference.Query.future(long_query()) for inference in inferences]
    until(lambda: pair.load().running + pair.load().waiting == CONNECTIONS)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: any(call.done() for call in calls))
    lost = [call for call in calls if call.done()]
    assert {failure_of(call.result).code for call in lost} == {grpc.StatusCode.UNAVAILABLE}
    for call in calls:
        call.cancel()
    pair.worker_pids(len(first) + 1)
    until(lambda: answers(pair))
    pair.settle()
    for inference in inferences:
        assert len(inference.Detect(PROBE, wait_for_ready=True).objects) == 1
    pair.settle()


# ---------------------------------------------------------------- devices
# A server with two engines, each in a process of its own.

OPTIONS = ("--model", "null", "--devices", "cpu,cpu", "--null-step-ms", "20")
CALLERS = 12
TOKENS = 100


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory):
    """Two engines without a model, of which one may be killed."""
    with Server(tmp_path_factory.mktemp("devices"), *OPTIONS) as running:
        yield running


def image(number=0):
    data = image_bytes(size=(8 + number, 6))
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))


def engine_pids(server):
    """By the number of the engine, of those that run now."""
    return {each["engine"]: each["pid"] for each in server.events("engine_ready") if "pid" in each}


def detect(server, shown):
    request = inference_pb2.DetectRequest(image=shown, object="cup")
    return server.inference.Detect(request).info


def test_a_known_image_is_answered_from_a_cache(two_engines):
    """Whichever engine has computed it, by its bytes and by its id; new ones are shared."""
    steps = [each.step for each in two_engines.load().engines]
    first = [detect(two_engines, image(number)) for number in range(4)]
    assert not any(each.image.cache_hit for each in first)
    for number, info in enumerate(first):
        assert detect(two_engines, image(number)).image.cache_hit
        assert detect(two_engines, media_pb2.Image(image_id=info.image.image_id)).image.cache_hit
    until(lambda: all(a.step > b for a, b in zip(two_engines.load().engines, steps, strict=True)))


async def stream(stub, number):
    """Read a stream to its end; return its text and how often it changed the engine."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question="what?"))
    task.sampling.max_tokens = TOKENS
    request = inference_pb2.GenerateRequest(task=task, image=image(20 + number))
    events = [event async for event in stub.Generate(request)]
    (last,) = (event.finished for event in events if event.HasField("finished"))
    return last.result.query.answer, last.info.resumptions


async def read_streams(address, while_they_run):
    """Read all streams at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [asyncio.create_task(stream(stub, number)) for number in range(CALLERS)]
        await asyncio.to_thread(while_they_run)
        return await asyncio.gather(*calls)


@contextlib.contextmanager
def changes_of_health(server):
    """The statuses after the first one, until the end of the block."""
    watch = server.watch()
    next(watch)
    changes: list[int] = []

    def read():
        with contextlib.suppress(grpc.RpcError):
            changes.extend(each.status for each in watch)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield changes
    finally:
        watch.cancel()
        thread.join()


async def test_the_end_of_an_engine_is_seen_by_its_requests_only(two_engines):
    """They go on with the other one at once; the server never stops serving."""
    killed = engine_pids(two_engines)[0]
    loads = []

    def look():
        until(lambda: two_engines.load().running == CALLERS)

    def kill():
        look()
        loads.extend(two_engines.load().engines)
        os.kill(killed, signal.SIGKILL)

    calm = await read_streams(two_engines.address, look)
    await asyncio.to_thread(until, lambda: two_engines.load().running == 0)
    with changes_of_health(two_engines) as changes:
        ended = await read_streams(two_engines.address, kill)
        await asyncio.to_thread(until, lambda: engine_pids(two_engines)[0] != killed)
        await asyncio.to_thread(until, lambda: _serving(two_engines) == 2)
    assert not changes
    assert [text for text, _ in ended] == [text for text, _ in calm]
    assert [each.running for each in loads] == [CALLERS // 2] * 2
    assert collections.Counter(resumptions for _, resumptions in ended) == {0: 6, 1: 6}
    assert [each["engine"] for each in two_engines.wait_for("engine_lost")] == [0]
    assert two_engines.load().engines[0].restarts == 1


def test_a_request_that_ends_engines_reaches_two_of_three(tmp_path):
    """It ends with POISONED, all engines refuse it then, and the others are answered."""
    options = ("--model", "null", "--devices", "cpu,cpu,cpu", "--null-step-ms", "5")
    deadly = inference_pb2.QueryRequest(question=f"say {DEADLY}")
    with Server(tmp_path, *options, program=QUICK, environment=FAILPOINT) as server:
        long = inference_pb2.QueryRequest(question="what?")
        long.sampling.max_tokens = 400
        healthy = [server.inference.Query.future(long) for _ in range(6)]
        assert failure_of(lambda: server.inference.Query(deadly)).reason == "POISONED"
        answers = [call.result() for call in healthy]
        assert len({each.answer for each in answers}) == 1
        assert len({each["engine"] for each in server.wait_for("engine_lost", 4)}) == 2
        again = [server.inference.Query.future(deadly) for _ in range(6)]
        assert {failure_of(call.result).reason for call in again} == {"POISONED"}
        assert len(server.events("engine_lost")) == 4


def test_an_upload_outlives_its_engine(two_engines):
    """The other engine holds it then."""
    images = image_pb2_grpc.ImageServiceStub(two_engines.channel)
    pieces = (
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(mime_type="image/png")),
        image_pb2.PutImageRequest(chunk=image_bytes(size=(60, 60))),
    )
    held = images.PutImage(iter(pieces)).image
    named = media_pb2.Image(image_id=held.image_id)
    assert detect(two_engines, named).image.cache_hit
    pids = engine_pids(two_engines)
    for pid in pids.values():  # one of them holds it, and the next holder goes as well
        os.kill(pid, signal.SIGKILL)
        until(lambda: _serving(two_engines) == 2)
        assert detect(two_engines, named).image.image_id == held.image_id
    until(lambda: detect(two_engines, named).image.cache_hit)


def _serving(server):
    return sum(each.state == "serving" for each in server.load().engines)


# ---------------------------------------------------------------- many callers
# Many clients at once, and many requests one after the other.

MEBIBYTE = 1024 * 1024
SERVICE_GROWTH = 8 * MEBIBYTE


async def test_64_callers_are_all_answered(server, alone):
    """Each of 64 connections gets its own answer, once, and the right one."""
    chosen = [random.Random(number).randrange(len(alone)) for number in range(64)]
    bag = jobs()

    async def call(job):
        async with AsyncClient(server.address) as caller:
            return await ask_async(caller, job)

    answers = await asyncio.gather(*(call(bag[number]) for number in chosen))
    assert answers == [alone[number] for number in chosen]
    await asyncio.to_thread(server.settle)


async def test_64_streams_are_all_finished(server):
    """Each of 64 streams on one connection ends with its own result, once."""
    scene = two_shapes().image
    async with AsyncClient(server.address) as caller:

        async def read(number):
            options = Options(request_id=f"stream-{number}")
            task = DetectTask("red circle", task_id=str(number))
            events = [event async for event in caller.generate(scene, task, options=options)]
            (last,) = [event for event in events if isinstance(event, Finished)]
            return last.result

        results = await asyncio.gather(*map(read, range(64)))
    assert [result.task_id for result in results] == [str(number) for number in range(64)]
    assert [result.info.request_id for result in results] == [f"stream-{n}" for n in range(64)]
    assert all(result.objects == results[0].objects for result in results)
    assert len(results[0].objects) == 1


LANES = 8


class Worker:
    """Requests of every kind; one in eight brings a new image, one in eight is abandoned."""

    def __init__(self, address):
        self._address = address
        self._offsets = itertools.cycle(range(60))

    async def run(self, count):
        """That many requests, eight at a time."""
        numbers = iter(range(count))
        async with AsyncClient(self._address) as caller:
            await asyncio.gather(*(self._lane(caller, numbers) for _ in range(LANES)))

    async def _lane(self, caller, numbers):
        known = two_shapes().image
        for number in numbers:
            match number % 8:
                case 0:
                    image = two_shapes(next(self._offsets)).image
                    await caller.detect(image, "red circle", options=Options(cache_image=False))
                case 1:
                    await caller.run_tasks(known, [CaptionTask("short"), DetectTask("square")])
                case 2:
                    events = caller.generate(known, QueryTask("hello", sampling=WILD))
                    await anext(events)
                    await events.aclose()
                case 3:
                    [event async for event in caller.generate(known, CaptionTask("short"))]
                case _:
                    await caller.query(None, "hello", sampling=Sampling(max_tokens=3))


LONG = (pytest.mark.slow, pytest.mark.timeout(600))  # minutes, on a slow machine


@pytest.mark.parametrize(
    ("count", "engine_growth"),
    [(120, 18 * MEBIBYTE), pytest.param(3000, 24 * MEBIBYTE, marks=LONG)],
)
async def test_memory_and_files_stay(server, count, engine_growth):
    """After a warm-up, many requests leave memory within a bound, and no file open.

    Allocators keep what they once had. A prepared image is 1.3 MiB in the engine, and one of eight
    requests brings a new one, so a leak of them passes its bound.
    """
    worker = Worker(server.address)
    await worker.run(60)
    await asyncio.to_thread(server.settle)
    pids = (server.process.pid, server.engine_pid)
    memory = [own_bytes(pid) for pid in pids]
    files = [open_files(pid) for pid in pids]
    await worker.run(count)
    await asyncio.to_thread(server.settle)
    gained = [own_bytes(pid) - before for pid, before in zip(pids, memory, strict=True)]
    bounds = (SERVICE_GROWTH, engine_growth)
    for pid, size, before, bound in zip(pids, gained, files, bounds, strict=True):
        assert size < bound
        await asyncio.to_thread(until, functools.partial(_opened_no_more, pid, before))


def _opened_no_more(pid, before):
    """But for the files that a pool keeps: as many more as run at once. A leak is thirty."""
    return open_files(pid).total() <= before.total() + LANES
