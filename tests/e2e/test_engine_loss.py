"""The engine dies, hangs or is stopped; the service tells the truth, and every call is answered."""

import asyncio
import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, session_pb2_grpc
from legato_client import Client, Finished, QueryTask, Sampling
from legato_engine.bench.replay import main as replay_main
from legato_engine.failpoints import VARIABLE

from tests.e2e.history import Call, Stubs
from tests.e2e.kill_run import ENOUGH, asks, kill_run, leaving_nothing
from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import (
    ENVIRONMENT,
    NOT_SERVING,
    RANDOM,
    SERVING,
    SLOWLY,
    Server,
    exists,
    failure_of,
    until,
)
from tests.grammar import Grammar

SCENE = two_shapes()
QUICK = ("-m", "tests.e2e.quick_service")
NULL = ("--model", "null", "--null-step-ms", "20", "--null-objects", "1")
"""What is lost is a process; what its model had said, the tests of `lasting` ask for."""
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    """A server whose engine may be killed."""
    late = {VARIABLE: "engine.startup=sleep(2)"}  # so that there is none for a while
    folder = tmp_path_factory.mktemp("mortal")
    with Server(folder, *NULL, program=QUICK, environment=late) as running:
        yield running


class HealthLog:
    """What a watcher of the server's health is told, in order."""

    def __init__(self, server):
        self.seen: list[int] = []
        self._watch = server.watch()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.seen)

    def _read(self):
        try:
            for response in self._watch:
                self.seen.append(response.status)
        except grpc.RpcError:
            return  # the watch is over

    def close(self):
        """Watch no more."""
        self._watch.cancel()
        self._thread.join()


@pytest.mark.real_start
def test_a_killed_engine_is_told_and_replaced(mortal):
    """Health flips; requests in flight go on with the next engine; new ones are answered."""
    before = mortal.inference.Detect(PROBE)
    health = HealthLog(mortal)
    stream = mortal.inference.Generate(long_stream())
    unary = mortal.inference.Query.future(long_query())
    grammar = Grammar()
    for _ in range(5):
        grammar.feed(next(stream))
    until(lambda: mortal.holds(running=2, waiting=0))
    killed = mortal.kill_engine()

    until(lambda: health.seen == [SERVING, NOT_SERVING, SERVING])
    health.close()
    assert not exists(killed)
    assert mortal.engine_pid != killed
    collections.deque(map(grammar.feed, stream))
    grammar.end(ok=True)
    assert grammar.events[-1].finished.info.resumptions == 1
    assert unary.result().info.resumptions == 1
    assert mortal.inference.Detect(PROBE).objects == before.objects
    mortal.settle()


@pytest.mark.real_start
def test_requests_are_refused_while_there_is_no_engine(mortal):
    """Until the new engine is ready a call is refused at once, as UNAVAILABLE with a reason."""
    health = HealthLog(mortal)
    mortal.kill_engine()
    until(lambda: NOT_SERVING in health.seen)
    refused = failure_of(lambda: mortal.inference.Detect(PROBE))
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.reason in ("ENGINE_LOST", "ENGINE_STARTING")
    assert refused.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    until(lambda: mortal.load().engine_state in ("lost", "starting"))
    until(mortal.is_serving)
    health.close()
    assert len(mortal.inference.Detect(PROBE).objects) == 1


@pytest.mark.real_start
def test_the_engine_dies_with_the_service(tmp_path):
    """When the service is killed its engine leaves too, even in the middle of an answer."""
    with Server(tmp_path, *NULL) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream())
        next(stream)
        server.process.kill()
        until(lambda: not exists(engine))
        with pytest.raises(grpc.RpcError):
            list(stream)


@pytest.mark.real_start
@pytest.mark.slow
def test_an_engine_that_hangs_is_replaced(mortal):
    """A stopped engine turns the health, is put down, and another answers."""
    health = HealthLog(mortal)
    hung = mortal.engine_pid
    os.kill(hung, signal.SIGSTOP)
    until(lambda: health.seen == [SERVING, NOT_SERVING, SERVING])
    health.close()
    assert not exists(hung)
    assert len(mortal.inference.Detect(PROBE).objects) == 1


# ---------------------------------------------------------------- crash bundle
# An engine that dies leaves a bundle, and the bundle can be run again.

FAULT = "engine.commit=exit@90"


def replay(*words):
    """Run `legato replay`."""
    return subprocess.run(
        [sys.executable, "-m", "legato_client.cli", "replay", *words, "--threads", "2"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_is_bundled_and_happens_again_in_a_replay(tmp_path, monkeypatch):
    """With its failpoint; without, the same launches run to their end."""
    monkeypatch.setitem(ENVIRONMENT, "LEGATO_FAILPOINTS", FAULT)
    folder = tmp_path / "crashes"
    with Server(tmp_path, "--crash-folder", str(folder)) as server:
        with pytest.raises(grpc.RpcError):
            list(server.inference.Generate(long_stream()))
        path = server.wait_for("engine_crash_bundle")[0]["path"]
    monkeypatch.delitem(ENVIRONMENT, "LEGATO_FAILPOINTS")
    bundle = json.loads((pathlib.Path(path) / "bundle.json").read_text())
    assert bundle["death"]["exit_code"] == 86
    assert bundle["failpoints"] == FAULT
    assert len(bundle["in_flight"]) == 1
    assert [shape["committed"] for shape in bundle["launches"]][-3:] == [True, False, False]
    again = replay(path)
    assert again.returncode == 3, again.stderr
    assert "exited with code 86: the crash happened again" in again.stdout
    without = replay(path, "--no-failpoints")
    assert without.returncode == 0, without.stderr
    assert "The crash did not happen again" in without.stdout


def test_a_killed_engine_leaves_a_bundle_with_its_stacks(tmp_path):
    """SIGABRT writes stacks; the bundle names the signal. An engine that is stopped leaves none."""
    folder = tmp_path / "crashes"
    with Server(tmp_path, "--model", "null", "--crash-folder", str(folder)) as server:
        os.kill(server.engine_pid, signal.SIGABRT)
        path = pathlib.Path(server.wait_for("engine_crash_bundle")[0]["path"])
        until(server.is_serving)
    assert json.loads((path / "bundle.json").read_text())["signal"] == "SIGABRT"
    assert "process.py" in (path / "stacks.txt").read_text()
    assert list(folder.iterdir()) == [path]


def test_a_replay_of_no_bundle_says_so(tmp_path, capsys):
    """With exit code 2."""
    assert replay_main([str(tmp_path)]) == 2
    assert "is no crash bundle" in capsys.readouterr().err


# ---------------------------------------------------------------- pauses
# Either process is stopped by a signal for a while, as by a debugger, a snapshot or a freezer.

PAUSES = [2, pytest.param(20, marks=pytest.mark.slow), pytest.param(90, marks=pytest.mark.slow)]


@pytest.fixture
def server(tmp_path):
    """A server of its own."""
    with Server(tmp_path, "--model", "null") as running:
        yield running


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", PAUSES)
def test_a_pause_of_the_service_costs_no_engine(server, seconds):
    """The service does not take its own pause for one of the engine: the same engine serves on."""
    engine = server.engine_pid
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(server.process.pid, signal.SIGCONT)
    until(server.is_serving)
    for _ in range(20):
        assert server.inference.Detect(PROBE).objects
        time.sleep(0.05)
    assert server.engine_pid == engine
    assert not server.events("engine_hung")
    assert not server.events("engine_lost")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_callers_are_refused_while_the_engine_is_paused(tmp_path, processes):
    """Every process refuses at once, and serves when the engine continues."""
    with Server(tmp_path, "--model", "null", "--processes", processes) as server:
        engine = next(pid for pid in server.child_pids() if "core.process" in command(pid))
        os.kill(engine, signal.SIGSTOP)
        server.wait_for("engine_hung", int(processes))
        for _ in range(5):
            with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)):
                refused = failure_of(lambda: server.inference.Detect(PROBE))
                assert refused.code is grpc.StatusCode.UNAVAILABLE
                assert refused.reason == "ENGINE_LOST"
                assert refused.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert not server.is_serving()
        os.kill(engine, signal.SIGCONT)
        until(server.is_serving)
        server.wait_for("engine_responds", int(processes))
        assert server.inference.Detect(PROBE).objects
        assert not server.events("engine_lost")


def command(pid):
    """The command line of a process."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [20, 90])
def test_an_engine_that_is_paused_for_long_is_replaced(server, seconds):
    """Another one serves long before the pause ends, and the end of the pause changes nothing."""
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    timer = threading.Timer(seconds, lambda: _continue(engine))
    timer.start()
    server.wait_for("engine_killed")
    until(server.is_serving)
    assert timer.is_alive()
    assert not exists(engine)
    timer.join()
    assert server.inference.Detect(PROBE).objects
    assert server.engine_pid != engine


def _continue(pid):
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


# ---------------------------------------------------------------- no lost work

BRISK, SLOW = (("--model", "null", "--null-step-ms", each) for each in ("5", "20"))


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--speculation", "fixed:3"), marks=pytest.mark.slow)],
    ids=["", "speculation"],
)
def lasting(tmp_path_factory, request):
    """A server whose engine may be killed."""
    folder = tmp_path_factory.mktemp("mortal")
    with Server(folder, *RANDOM, *request.param, program=QUICK, environment=SLOWLY) as running:
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


async def test_every_kind_of_call_outlives_an_engine(lasting):
    """Streams, unary calls, several tasks and a session answer as without the kill."""
    calls = asks(200)
    expected, _ = await ask_all(lasting.address, calls)
    asking = asyncio.create_task(ask_all(lasting.address, calls))
    await asyncio.to_thread(until, lambda: lasting.load().running >= 4)
    await asyncio.to_thread(lasting.kill_engine)
    answers, made = await asking
    assert answers == expected
    assert sum(call.resumptions == 1 for call in made.values()) >= 4
    lasting.settle()


def test_a_stream_goes_on_where_it_was(lasting):
    """Its events count on, `started` comes once, and `resumptions` says what happened."""
    calm = list(lasting.inference.Generate(long_stream()))
    stream = lasting.inference.Generate(long_stream())
    grammar = Grammar()
    for _ in range(5):
        grammar.feed(next(stream))
    lasting.kill_engine()
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
                for each in lasting.events("rpc_ended")
                if each["request_id"] == finished.info.request_id
            ]
            == [1]
        )
    )
    (resumed,) = (
        each
        for each in lasting.events("request_resumed")
        if each["request_id"] == finished.info.request_id
    )
    assert resumed["tokens"] >= 4
    lasting.settle()


def test_a_deadline_counts_while_there_is_no_engine(lasting):
    """The call ends by its deadline; nothing of it reaches the next engine."""
    call = lasting.inference.Query.future(long_query(), timeout=600)
    until(lambda: lasting.holds(running=1, waiting=0))
    os.kill(lasting.engine_pid, signal.SIGSTOP)
    late = lasting.inference.Query.future(long_query(), timeout=0.5)
    assert failure_of(late.result).code is grpc.StatusCode.DEADLINE_EXCEEDED
    lasting.kill_engine()
    assert call.result().info.resumptions == 1
    lasting.settle()


def test_the_client_tells_resumptions(lasting):
    """The result of the Python client carries the number."""
    task = QueryTask("hello", sampling=Sampling(temperature=100.0, max_tokens=200, seed=3))
    with Client(lasting.address) as client:
        assert client.query(None, "hello").info.resumptions == 0
        stream = client.generate(None, task)
        events = iter(stream)
        next(events)
        lasting.kill_engine()
        *_, last = events
    assert isinstance(last, Finished)
    assert last.result.info.resumptions == 1


async def test_adapters(tmp_path):
    """A request with an adapter goes on with it."""
    request = inference_pb2.DetectRequest(
        image=SCENE.message(),
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
    deadly = inference_pb2.QueryRequest(question=f"say {DEADLY}", image=SCENE.message())
    with server:
        channels = [
            grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
            for _ in range(8)
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        calm = stubs[0].Query(long_query())
        healthy = [stub.Query.future(long_query()) for stub in stubs[:4]]
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
        other = inference_pb2.QueryRequest(question="another", image=SCENE.message())
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
