"""Channels of a client: connections, configuration, and streams that continue elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from legato.v1 import (
    image_pb2,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
    task_pb2,
)
from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    Finished,
    InternalError,
    NotFound,
    Options,
    QueryTask,
    RawFrame,
    Started,
    TextDelta,
    Unavailable,
)
from legato_client._errors import from_rpc_error
from legato_client._grpc import channel, transport
from legato_client._images.sources import to_image
from legato_client._proto.requests import Upload
from legato_engine import errors
from legato_engine.client.monitor import EngineState
from legato_engine.images import decoding
from legato_engine.images.raw import row_bytes
from legato_engine.types import BlobRef, PixelFormat, RawImage

from tests.clients.python.fake_server import INFO, Failure, failure, retry_info
from tests.service.fakes import FakeEngine, answer
from tests.service.harness import refusal, running

PATIENCE = 60.0  # seconds
LIMIT = transport.CALLS_PER_CHANNEL
MANY = 2 * LIMIT + 1


class Held(inference_pb2_grpc.InferenceServiceServicer, server_pb2_grpc.ServerServiceServicer):
    """Begins every stream, and ends none until the test does."""

    def Query(self, *_):
        """Do nothing: as all below, it is not called."""

    Caption = Detect = Point = Segment = RunTasks = ListModels = Query

    def __init__(self):
        self.may_end = asyncio.Event()
        self.peers = set()

    async def Generate(self, _request, context):
        """Begin, wait, end."""
        self.peers.add(context.peer())
        started = inference_pb2.Started(request_id="r", model="fake", input_tokens=1)
        yield inference_pb2.GenerateResponse(index=0, started=started)
        await self.may_end.wait()
        finished = inference_pb2.Finished(info=INFO)
        finished.result.caption.caption = "a cat"
        yield inference_pb2.GenerateResponse(index=1, finished=finished)

    async def GetServerInfo(self, _request, _context):
        """Answer at once."""
        return server_pb2.GetServerInfoResponse(name="legato")


@contextlib.asynccontextmanager
async def serving():
    """A server that begins as many calls of a connection as a channel carries."""
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", LIMIT)])
    held = Held()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(held, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(held, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield held, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.timeout(120)
async def test_every_stream_begins():
    """More streams than a server begins on one connection, and a call beside them, all begin."""
    async with serving() as (held, target), AsyncClient(target, token="") as client:
        begun = asyncio.Semaphore(0)

        async def read():
            async for event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                if isinstance(event, Started):
                    begun.release()

        readers = [asyncio.create_task(read()) for _ in range(MANY)]
        for _ in readers:
            await asyncio.wait_for(begun.acquire(), PATIENCE)
        assert (await client.server_info(timeout=PATIENCE)).name == "legato"
        assert len(held.peers) == 3
        held.may_end.set()
        await asyncio.gather(*readers)
        assert [each.num_calls for each in client._connection._channels] == [0, 0, 0]
        for _ in range(3):
            async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                pass
        assert len(held.peers) == 3


async def test_two_clients_have_connections_of_their_own():
    """The calls of one client are not limited by those of another one of the same process."""
    async with serving() as (held, target):
        held.may_end.set()
        for _ in range(2):
            async with AsyncClient(target, token="") as client:
                async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                    pass
        assert len(held.peers) == 2


async def test_calls_that_end_early_make_room():
    """Streams that are closed, cancelled or refused count no longer."""
    async with serving() as (_held, target), AsyncClient(target, token="") as client:
        for _ in range(3):
            events = client.generate(None, CaptionTask(), timeout=PATIENCE)
            await anext(events)
            await events.aclose()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                        pass
        assert [each.num_calls for each in client._connection._channels] == [0]


# ---------------------------------------------------------------- affinity
# The metadata that keeps calls about one image, or of one session, on one server.

HELD = media_pb2.Image(image_id="img_1")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (inference_pb2.DetectRequest(image=HELD), "img_1"),
        (inference_pb2.GenerateRequest(image=HELD), "img_1"),
        (image_pb2.DeleteImageRequest(image_id="img_1"), "img_1"),
        (session_pb2.SessionOpen(session_name="arm 7\n"), "arm%207%0A"),
        (session_pb2.SessionOpen(), ""),
        (inference_pb2.QueryRequest(question="why?"), ""),
        (inference_pb2.DetectRequest(image=to_image(b"jpeg")), ""),
    ],
)
def test_what_names_a_server(request_, expected):
    """An image id or a session's name, as printable ASCII; other calls go anywhere."""
    assert channel.of(request_) == expected


def test_an_uploads_id_is_known_before_it_is_sent():
    """The client derives the id of a file as the engine does."""
    assert Upload.of(to_image(b"jpeg"), None).image_id == decoding.image_id(
        decoding.content_key(b"jpeg")
    )


@pytest.mark.parametrize("form", list(PixelFormat))
@pytest.mark.parametrize("stride", [0, 64])
def test_pixels_have_the_engines_id_too(form, stride):
    """In every format, with padded rows or none."""
    frame = RawFrame(bytes(64 * 3), 2, 2, form.value, stride)
    raw = RawImage(
        blob=BlobRef(name="", size=0),
        width=2,
        height=2,
        row_stride=stride or row_bytes(form, 2),
        format=form,
    )
    upload = Upload.of(to_image(frame), None)
    assert upload.image_id == decoding.image_id(decoding.content_key(upload.data, raw))


# ---------------------------------------------------------------- resumption
# Streams that go on with another server: what is asked, and what the caller sees.

IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(16)
LOST = Failure(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def soon(monkeypatch):
    """Delays that tests need not wait for."""
    monkeypatch.setattr(transport, "_DELAYS", (0.001,) * 3)


def stream(*rows):
    return [
        inference_pb2.GenerateResponse(index=index, checkpoint=checkpoint, **{name: body})
        for index, (name, body, checkpoint) in enumerate(rows)
    ]


def started(**fields):
    return (
        "started",
        inference_pb2.Started(request_id="r-1", model="fake", input_tokens=7),
        inference_pb2.Checkpoint(model="fake", seed=3, **fields),
    )


def text(word, *token_ids):
    checkpoint = inference_pb2.Checkpoint(token_ids=token_ids) if token_ids else None
    return ("text", inference_pb2.TextDelta(text=word), checkpoint)


def finished(answer):
    result = task_pb2.TaskResult(query=task_pb2.QueryResult(answer=answer))
    return ("finished", inference_pb2.Finished(result=result, info=INFO), None)


def words(events):
    return [event.text for event in events if isinstance(event, TextDelta)]


@pytest.mark.usefixtures("soon")
def test_a_lost_stream_goes_on_with_its_checkpoints(client, server):
    """The next server is given all tokens; nothing is told twice, what was uncovered again."""
    server.script["Generate"] += [
        [*stream(started(), text("one", 1, 2), text(" two", 3), text(" uncovered")), LOST],
        [*stream(started(resumptions=1), text(" three", 4)), LOST],
        stream(started(resumptions=2), text(" four", 5), finished("one two three four")),
    ]
    events = client.generate(IMAGE, QueryTask("?"), options=Options(request_id="mine"))
    assert words(events) == ["one", " two", " three", " four"]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Finished)
    first, second, third = (each for name, each, _ in server.requests if name == "Generate")
    assert first.checkpoints
    assert not first.HasField("resume_from")
    assert second.resume_from == inference_pb2.Checkpoint(model="fake", seed=3, token_ids=[1, 2, 3])
    assert third.resume_from.token_ids == [1, 2, 3, 4]
    assert third.resume_from.resumptions == 1
    for again in (second, third):
        assert (again.image, again.task) == (first.image, first.task)
        assert again.options.request_id == "r-1", "the id that the stream has"


@pytest.mark.usefixtures("soon")
def test_events_wait_for_their_checkpoint(client, server):
    """Two events of one step are told together, once."""
    server.script["Generate"] += [
        [*stream(started(), text("a"), text("b", 1), text("c")), LOST],
        stream(started(), text("c"), text("d", 2), finished("abcd")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a", "b", "c", "d"]


@pytest.mark.usefixtures("soon")
def test_three_resumptions(client, server):
    """The fourth loss is raised."""
    server.script["Generate"] += [[*stream(started(), text("a", 1)), LOST]] * 4
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"))
    assert server.count("Generate") == 4


@pytest.mark.usefixtures("soon")
def test_a_connection_that_is_cut(client, server):
    """A transport says INTERNAL or UNKNOWN then, without the reason that a server gives."""
    cut = Failure(grpc.StatusCode.INTERNAL)
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), cut],
        [*stream(started(), text("b", 2)), Failure(grpc.StatusCode.UNKNOWN)],
        stream(started(), finished("ab")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a", "b"]
    bug = failure(grpc.StatusCode.INTERNAL, "INTERNAL")
    server.script["Generate"].append([*stream(started(), text("a", 1)), bug])
    with pytest.raises(InternalError):
        client.generate(IMAGE, QueryTask("?"))
    assert server.count("Generate") == 4


@pytest.mark.usefixtures("soon")
def test_a_stream_that_loses_its_end(client, server):
    """Also when `finished` came: its status tells whether it is the end."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1), finished("a")), LOST],
        stream(started(), finished("a")),
    ]
    events = client.generate(IMAGE, QueryTask("?"))
    assert words(events) == ["a"]
    assert sum(isinstance(event, Finished) for event in events) == 1


@pytest.mark.usefixtures("soon")
def test_a_busy_server_is_waited_for(client, server):
    """As long as it asks for, and it counts as a resumption."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.01))
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        full,
        stream(started(), finished("a")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a"]


@pytest.mark.usefixtures("soon")
def test_what_the_next_server_refuses_is_raised(client, server):
    """It may not hold the image."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        failure(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"),
    ]
    with pytest.raises(NotFound):
        client.generate(IMAGE, QueryTask("?"))


@pytest.mark.usefixtures("soon")
def test_not_beyond_the_deadline(client, server, monkeypatch):
    """A resumption that would come too late is left out."""
    monkeypatch.setattr(transport, "_DELAYS", (100.0,) * 3)
    server.script["Generate"].append([*stream(started(), text("a", 1)), LOST])
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"), timeout=10)
    assert server.count("Generate") == 1


# ---------------------------------------------------------------- service configuration
# The shipped configuration, and the environment of gRPC in a caller's process.

QUESTION = inference_pb2.QueryRequest(question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
ONE = channel.of_target("127.0.0.1:1")
SEVERAL = json.dumps(channel.load())


class Attempts:
    """Fails the first attempts with these errors, in turn; remembers when each attempt came."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.times: list[float] = []

    def __call__(self, engine, stream):
        """The script of a `FakeEngine`."""
        self.times.append(time.monotonic())
        if self.failures:
            engine.fail(stream, self.failures.pop(0))
        else:
            answer(engine, stream)


def starting(retry_after_ms=1):
    """What a server says while its model loads."""
    return errors.EngineStarting("loading", retry_after_ms=retry_after_ms)


def options(config):
    """Channel options of a client that knows nothing but the configuration."""
    return [("grpc.service_config", config), ("grpc.enable_retries", 1)]


async def ask(server, rpc):
    """One call, to its end."""
    if rpc == "Query":
        return [await server.inference.Query(QUESTION)]
    return [event async for event in server.inference.Generate(STREAM)]


def test_it_speaks_of_what_there_is():
    """Services and the health check's service are the contract's; only UNAVAILABLE is retried."""
    config = channel.load()
    pool = descriptor_pool.Default()
    (method,) = config["methodConfig"]
    names = [name["service"] for name in method["name"]]
    for service in (*names, config["healthCheckConfig"]["serviceName"]):
        assert pool.FindServiceByName(service).full_name == service
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert method["retryPolicy"]["maxAttempts"] == channel.MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("target", "several"),
    [
        ("127.0.0.1:50051", False),
        ("robot.local:50051", False),
        ("unix:/run/legato.sock", False),
        ("dns:///legato.svc:50051", True),
        ("ipv4:10.0.0.1:50051,10.0.0.2:50051", True),
    ],
)
def test_only_several_servers_are_balanced(target, several):
    """The health check and round_robin are for names that stand for several servers."""
    config = json.loads(channel.of_target(target))
    assert ("healthCheckConfig" in config) == ("loadBalancingConfig" in config) == several
    assert config["methodConfig"] == channel.load()["methodConfig"]


@pytest.mark.parametrize("config", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_a_start_up_is_waited_for(rpc, config):
    """A stock channel retries a server that is starting, twice, and the call succeeds."""
    attempts = Attempts(starting(), starting())
    async with running(FakeEngine(attempts), options(config)) as server:
        assert await ask(server, rpc)
    assert len(attempts.times) == 3


async def test_the_third_attempt_is_the_last():
    """A server that keeps saying so is believed, and the failure arrives whole."""
    attempts = Attempts(*(starting() for _ in range(9)))
    async with running(FakeEngine(attempts), options(ONE)) as server:
        failed = await refusal(server.inference.Query(QUESTION))
    assert failed.reason == "ENGINE_STARTING"
    assert len(attempts.times) == 3


@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_the_servers_delay_is_obeyed(rpc):
    """`grpc-retry-pushback-ms` replaces the backoff, which is far shorter."""
    attempts = Attempts(starting(retry_after_ms=1000))  # told as 800 to 1200
    async with running(FakeEngine(attempts), options(ONE)) as server:
        assert await ask(server, rpc)
    first, second = attempts.times
    assert second - first >= 0.79


@pytest.mark.parametrize(
    "error",
    [
        errors.QueueFull("full", retry_after_ms=1),
        errors.InvalidField("no"),
        errors.StoppedByOperator("x"),
    ],
)
async def test_nothing_else_is_retried(error):
    """Load, the caller's mistakes and an operator's decision come back at once."""
    attempts = Attempts(error, error)
    async with running(FakeEngine(attempts), options(ONE)) as server:
        await refusal(server.inference.Query(QUESTION))
    assert len(attempts.times) == 1


async def test_a_broken_server_is_not_asked_thrice_by_everybody():
    """Retries are throttled: after some failures in a row each call is one attempt."""
    attempts = Attempts(*(starting() for _ in range(100)))
    async with running(FakeEngine(attempts), options(ONE)) as server:
        for _ in range(6):
            await refusal(server.inference.Query(QUESTION))
        before = len(attempts.times)
        await refusal(server.inference.Query(QUESTION))
    assert len(attempts.times) == before + 1


@asynccontextmanager
async def pair():
    """Two servers, and the one name of both."""
    async with running() as one, running() as other:
        yield one, other, f"ipv4:127.0.0.1:{one.port},127.0.0.1:{other.port}"


async def asked(stub):
    """One answer; raises what this package's clients raise."""
    try:
        return await stub.Query(QUESTION, timeout=10)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def spread(stub, *servers, goal):
    """Ask until the latest calls went as `goal` says: how many of four each server got."""
    while True:
        before = [len(server.engine.requests) for server in servers]
        for _ in range(4):
            with suppress(Unavailable):
                await asked(stub)
        after = [len(server.engine.requests) for server in servers]
        if [now - then for now, then in zip(after, before, strict=True)] == goal:
            return
        await asyncio.sleep(0.01)


async def test_calls_leave_a_server_that_does_not_serve():
    """Both get calls; one that says NOT_SERVING gets none, not even to refuse; then both again."""
    async with (
        pair() as (one, other, target),
        grpc.aio.insecure_channel(target, options(SEVERAL)) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await spread(stub, one, other, goal=[2, 2])
        one.engine.become(EngineState.STARTING)
        await spread(stub, one, other, goal=[0, 4])
        for _ in range(20):  # it would refuse what reached it
            await stub.Query(QUESTION)
        one.engine.become(EngineState.READY)
        await spread(stub, one, other, goal=[2, 2])


async def test_a_drained_server_is_left_without_a_failure():
    """A drain withdraws before it refuses, so that a client that watches health loses no call."""
    async with (
        pair() as (one, other, target),
        grpc.aio.insecure_channel(target, options(SEVERAL)) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await spread(stub, one, other, goal=[2, 2])
        one.server.begin_drain(60)
        for _ in range(20):  # a refusal in between is retried elsewhere
            await stub.Query(QUESTION)
        await spread(stub, one, other, goal=[0, 4])


async def test_the_client_leaves_it_too():
    """A name of several servers is enough for this package's client."""
    async with pair() as (one, other, target), AsyncClient(target) as client:
        one.engine.become(EngineState.STARTING)
        await client.query(None, "How many?")
        for _ in range(5):
            await client.query(None, "How many?")
        assert not one.engine.requests
        assert len(other.engine.requests) == 6


async def test_a_single_server_says_why_it_does_not_serve():
    """With one server no health check stands before its own answer, which has the reason."""
    engine = FakeEngine()
    engine.become(EngineState.STARTING)

    def call(port):
        with Client(f"127.0.0.1:{port}", timeout=30) as client:
            client.query(None, "How many?")

    async with running(engine) as server:
        with pytest.raises(Unavailable) as caught:
            await asyncio.to_thread(call, server.port)
    assert caught.value.reason == "ENGINE_STARTING"


# ---------------------------------------------------------------- grpc environment
# How gRPC is set up in the process of a caller.

BATCHES, CALLS = 20, 5

_CALLER = """
import json, os, re, sys
from pathlib import Path

EARLY

import legato_client
import grpc

def wakes():
    return sum(
        int(re.findall(r"voluntary_ctxt_switches:\\s+(\\d+)", (task / "status").read_text())[0])
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "event_engine"
    )

with grpc.insecure_channel(sys.argv[1]) as channel:
    echo = channel.unary_unary("/echo/Echo")
    echo(b"first")
    woken = []
    for _ in range(int(sys.argv[2])):
        before = wakes()
        for _ in range(int(sys.argv[3])):
            echo(b"again")
        woken.append(wakes() - before)
    print(json.dumps({"woken": sorted(woken), "left": os.environ.get("GRPC_EXPERIMENTS")}))
"""


_EARLY_CALLER = """
import sys, time

import legato_client
import grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    echo = channel.unary_unary("/echo/Echo")
    refused = False
    while True:
        try:
            echo(b"are you there?")
            break
        except grpc.RpcError:
            if not refused:
                print("refused", flush=True)
            refused = True
            time.sleep(0.1)
print("reached", flush=True)
"""


@contextmanager
def _echo(port=0):
    """A server that answers with what it is sent; its port."""
    with futures.ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        handlers = grpc.method_handlers_generic_handler("echo", {"Echo": handler})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def _call(*, given=None, early=""):
    """What a program saw that made calls after it imported this package; `early` it ran before.

    Of the batches of calls one of the quickest counts: some wakes a second are the clock's.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PYTHONPATH": paths} | ({} if given is None else {"GRPC_EXPERIMENTS": given})
    caller = _CALLER.replace("EARLY", early)
    with _echo() as port:
        done = subprocess.run(
            [sys.executable, "-c", caller, f"127.0.0.1:{port}", str(BATCHES), str(CALLS)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    seen = json.loads(done.stdout)
    return {**seen, "woken": seen["woken"][BATCHES // 4]}


def test_answers_are_read_by_who_waits_for_them():
    """No thread of grpc's event engine wakes for each call, and the environment is as it was."""
    seen = _call()
    assert seen["woken"] < CALLS / 2
    assert seen["left"] is None


@pytest.mark.parametrize(("given", "early"), [("event_engine_client", ""), (None, "import grpc")])
def test_a_program_decides_for_itself(given, early):
    """What its environment says of grpc holds, and so does what grpc read before."""
    seen = _call(given=given, early=early)
    assert seen["woken"] > CALLS / 2
    assert seen["left"] == given


@contextmanager
def _early_caller(port, **environment):
    """A program that asks a server again and again until it is there."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", _EARLY_CALLER, f"127.0.0.1:{port}"],
        env={"PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        try:
            yield caller
        finally:
            caller.kill()


def test_a_server_that_comes_late_is_noticed():
    """A client that asks only now and then notices the server.

    It does so sooner than one that says how seldom gRPC looks at connections between calls.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seldom = {"GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "4000"}
    with _early_caller(port) as caller, _early_caller(port, **seldom) as other:
        for each in (caller, other):
            assert each.stdout.readline() == "refused\n"
        with _echo(port):
            assert caller.stdout.readline() == "reached\n"
            assert other.poll() is None
