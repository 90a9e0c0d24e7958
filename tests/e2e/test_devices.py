"""A server with two engines, each in a process of its own."""

import asyncio
import collections
import contextlib
import os
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

from tests.e2e.server import Server, failure_of, until
from tests.e2e.test_no_lost_work import DEADLY, FAILPOINT, QUICK
from tests.service.harness import image_bytes

OPTIONS = ("--model", "null", "--devices", "cpu,cpu", "--null-step-ms", "20")
CALLERS = 12
TOKENS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory):
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


def test_a_known_image_is_answered_from_a_cache(server):
    """Whichever engine has computed it, by its bytes and by its id; new ones are shared."""
    steps = [each.step for each in server.load().engines]
    first = [detect(server, image(number)) for number in range(4)]
    assert not any(each.image.cache_hit for each in first)
    for number, info in enumerate(first):
        assert detect(server, image(number)).image.cache_hit
        assert detect(server, media_pb2.Image(image_id=info.image.image_id)).image.cache_hit
    until(lambda: all(a.step > b for a, b in zip(server.load().engines, steps, strict=True)))


async def stream(stub, number):
    """Read a stream to its end; return its text and how often it changed the engine."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question="what?"))
    task.sampling.max_tokens = TOKENS
    request = inference_pb2.GenerateRequest(task=task, image=image(20 + number))
    events = [event async for event in stub.Generate(request)]
    (last,) = (event.finished for event in events if event.HasField("finished"))
    return last.result.query.answer, last.info.resumptions


async def ask(address, while_they_run):
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


async def test_the_end_of_an_engine_is_seen_by_its_requests_only(server):
    """They go on with the other one at once; the server never stops serving."""
    killed = engine_pids(server)[0]
    loads = []

    def look():
        until(lambda: server.load().running == CALLERS)

    def kill():
        look()
        loads.extend(server.load().engines)
        os.kill(killed, signal.SIGKILL)

    calm = await ask(server.address, look)
    await asyncio.to_thread(until, lambda: server.load().running == 0)
    with changes_of_health(server) as changes:
        ended = await ask(server.address, kill)
        await asyncio.to_thread(until, lambda: engine_pids(server)[0] != killed)
        await asyncio.to_thread(until, lambda: _serving(server) == 2)
    assert not changes
    assert [text for text, _ in ended] == [text for text, _ in calm]
    assert [each.running for each in loads] == [CALLERS // 2] * 2
    assert collections.Counter(resumptions for _, resumptions in ended) == {0: 6, 1: 6}
    assert [each["engine"] for each in server.events("engine_lost")] == [0]
    assert server.load().engines[0].restarts == 1


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
        until(lambda: len(server.events("engine_lost")) == 4)
        assert len({each["engine"] for each in server.events("engine_lost")}) == 2
        again = [server.inference.Query.future(deadly) for _ in range(6)]
        assert {failure_of(call.result).reason for call in again} == {"POISONED"}
        assert len(server.events("engine_lost")) == 4


def test_an_upload_outlives_its_engine(server):
    """The other engine holds it then."""
    images = image_pb2_grpc.ImageServiceStub(server.channel)
    pieces = (
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(mime_type="image/png")),
        image_pb2.PutImageRequest(chunk=image_bytes(size=(60, 60))),
    )
    held = images.PutImage(iter(pieces)).image
    named = media_pb2.Image(image_id=held.image_id)
    assert detect(server, named).image.cache_hit
    pids = engine_pids(server)
    for pid in pids.values():  # one of them holds it, and the next holder goes as well
        os.kill(pid, signal.SIGKILL)
        until(lambda: _serving(server) == 2)
        assert detect(server, named).image.image_id == held.image_id
    until(lambda: detect(server, named).image.cache_hit)


def _serving(server):
    return sum(each.state == "serving" for each in server.load().engines)
