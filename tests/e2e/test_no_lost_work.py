"""The engine dies, and every call is answered as if it had not."""

import asyncio
import collections
import os
import signal

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, session_pb2_grpc
from legato_client import Client, Finished, QueryTask, Sampling

from tests.e2e.history import Call, Stubs
from tests.e2e.kill_run import ENOUGH, asks, kill_run, leaving_nothing
from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import SLOWLY, Server, failure_of, until
from tests.grammar import Grammar

IMAGE = two_shapes()
QUICK = ("-m", "tests.e2e.quick_service")
NULL = ("--model", "null", "--null-step-ms")
BRISK, SLOW = (*NULL, "5"), (*NULL, "20")


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--speculation", "fixed:3"), marks=pytest.mark.slow)],
    ids=["", "speculation"],
)
def mortal(tmp_path_factory, request):
    """A server whose engine may be killed."""
    folder = tmp_path_factory.mktemp("mortal")
    with Server(folder, *request.param, program=QUICK, environment=SLOWLY) as running:
        yield running


async def ask_all(address, calls):
    """Make these calls at the same time; return their answers and resumptions."""
    async with grpc.aio.insecure_channel(address) as channel:
        stubs = Stubs(
            inference_pb2_grpc.InferenceServiceStub(channel),
            session_pb2_grpc.SessionServiceStub(channel),
        )
        made = {name: Call(name) for name in calls}
        answers = await asyncio.gather(*(calls[name](stubs, made[name]) for name in calls))
        return dict(zip(calls, answers, strict=True)), made


async def test_every_kind_of_call_outlives_an_engine(mortal):
    """Streams, unary calls, several tasks and a session answer as without the kill."""
    calls = asks(200)
    expected, _ = await ask_all(mortal.address, calls)
    asking = asyncio.create_task(ask_all(mortal.address, calls))
    await asyncio.to_thread(until, lambda: mortal.load().running >= 4)
    await asyncio.to_thread(mortal.kill_engine)
    answers, made = await asking
    assert answers == expected
    assert sum(call.resumptions == 1 for call in made.values()) >= 4
    mortal.settle()


def test_a_stream_goes_on_where_it_was(mortal):
    """Its events count on, `started` comes once, and `resumptions` says what happened."""
    calm = list(mortal.inference.Generate(long_stream()))
    stream = mortal.inference.Generate(long_stream())
    grammar = Grammar()
    for _ in range(5):
        grammar.feed(next(stream))
    mortal.kill_engine()
    collections.deque(map(grammar.feed, stream))
    grammar.end(ok=True)
    finished = grammar.events[-1].finished
    assert finished.result.query == calm[-1].finished.result.query
    assert finished.info.resumptions == 1
    assert calm[-1].finished.info.resumptions == 0
    until(
        lambda: (
            [
                each["resumptions"]
                for each in mortal.events("rpc_ended")
                if each["request_id"] == finished.info.request_id
            ]
            == [1]
        )
    )
    (resumed,) = (
        each
        for each in mortal.events("request_resumed")
        if each["request_id"] == finished.info.request_id
    )
    assert resumed["tokens"] >= 4
    mortal.settle()


def test_a_deadline_counts_while_there_is_no_engine(mortal):
    """The call ends by its deadline; nothing of it reaches the next engine."""
    call = mortal.inference.Query.future(long_query(), timeout=600)
    until(lambda: mortal.holds(running=1, waiting=0))
    os.kill(mortal.engine_pid, signal.SIGSTOP)
    late = mortal.inference.Query.future(long_query(), timeout=0.5)
    assert failure_of(late.result).code is grpc.StatusCode.DEADLINE_EXCEEDED
    mortal.kill_engine()
    assert call.result().info.resumptions == 1
    mortal.settle()


def test_the_client_tells_resumptions(mortal):
    """The result of the Python client carries the number."""
    task = QueryTask("hello", sampling=Sampling(temperature=100.0, max_tokens=300, seed=3))
    with Client(mortal.address) as client:
        assert client.query(None, "hello").info.resumptions == 0
        stream = client.generate(None, task)
        events = iter(stream)
        next(events)
        mortal.kill_engine()
        *_, last = events
    assert isinstance(last, Finished)
    assert last.result.info.resumptions == 1


async def test_adapters(tmp_path):
    """A request with an adapter goes on with it."""
    request = inference_pb2.DetectRequest(
        image=IMAGE.message(),
        object="red circle",
        options=inference_pb2.RequestOptions(adapter="hazard"),
    )
    with Server(tmp_path, program=QUICK) as server:
        calm = server.inference.Detect(request)
        os.kill(server.engine_pid, signal.SIGSTOP)  # so that it has the request when it dies
        call = server.inference.Detect.future(request)
        server.kill_engine()
        again = call.result()
    assert again.objects == calm.objects
    assert again.info.resumptions <= 1


# ---------------------------------------------------------------- the request that ends engines

DEADLY = "xyzzy"
FAILPOINT = {"LEGATO_FAILPOINTS": f"engine.poison[{DEADLY}]=kill"}


@pytest.mark.parametrize(
    "options", [BRISK, pytest.param((), marks=pytest.mark.slow)], ids=["null", "legato-tiny"]
)
def test_the_request_that_ends_engines(tmp_path, options):
    """It alone ends with POISONED and is refused from then on; the others are answered."""
    server = Server(tmp_path, *options, "--processes", "2", program=QUICK, environment=FAILPOINT)
    deadly = inference_pb2.QueryRequest(question=f"say {DEADLY}", image=IMAGE.message())
    with server:
        channels = [
            grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
            for _ in range(8)
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        calm = stubs[0].Query(long_query())
        healthy = [stub.Query.future(long_query()) for stub in stubs]
        until(lambda: server.load().running >= 2)
        failed = failure_of(lambda: stubs[0].Query(deadly))
        assert failed.code is grpc.StatusCode.INTERNAL
        assert failed.reason == "POISONED"
        for call in healthy:
            answered = call.result()
            assert answered.answer == calm.answer
            assert answered.info.resumptions <= 2
        until(server.is_serving)
        engine = server.engine_pid
        assert {_refused(stub, deadly) for stub in stubs} == {"POISONED"}, "by both processes"
        other = inference_pb2.QueryRequest(question="another", image=IMAGE.message())
        assert stubs[0].Query(other).info.resumptions == 0
        assert server.engine_pid == engine
        assert len(server.wait_for("engine_lost", 4)) == 4
        assert len(server.wait_for("request_poisoned")) == 1
        server.settle()
        for channel in channels:
            channel.close()


def _refused(stub, request):
    """The reason, from a process that has heard of the new engine."""
    reason = "ENGINE_LOST"
    while reason in ("ENGINE_LOST", "ENGINE_STARTING"):
        reason = failure_of(lambda: stub.Query(request)).reason
    return reason


# ---------------------------------------------------------------- many kills


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one", "two"])
async def test_kills_under_load(tmp_path, options):
    """Nearly all calls end with the right answer and none with a wrong one; nothing stays."""
    with Server(tmp_path, *SLOW, *options, program=QUICK) as server, leaving_nothing(server):
        report = await kill_run(server, kills=6, length=40)
    assert report.wrong == []
    assert report.failed == []
    assert report.resumed >= 6


@pytest.mark.slow
async def test_kills_of_a_model_under_load(tmp_path):
    """The same with a model, whose engine takes seconds to start."""
    with Server(tmp_path, program=QUICK) as server, leaving_nothing(server):
        report = await kill_run(server, kills=12, width=4, length=60)
    assert report.wrong == []
    assert report.share >= ENOUGH
