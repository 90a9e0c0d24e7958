"""Drains, health, reflection, the watchdog, orphans, the latency policy and a start's display."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import subprocess
import sys
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb
from legato.v1 import image_pb2, inference_pb2, media_pb2, server_pb2, session_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.ipc.latency_policy import SERVICE_GC, SHARED
from legato_service import lifecycle
from legato_service.console import TerminalAnnouncer, example
from legato_service.rpc.reflection import SERVICES
from rich.console import Console

from tests.e2e.server import ENVIRONMENT
from tests.grammar import Grammar
from tests.service.fakes import MODEL, FakeEngine, answer, begin, delta, done, solution
from tests.service.harness import image_message, refusal, running, until

# ---------------------------------------------------------------- drain
# Draining: admitted requests finish, new ones are refused.

QUESTION = inference_pb2.QueryRequest(question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
INFERENCE = "legato.v1.InferenceService"


async def test_a_drain_finishes_open_calls_and_refuses_new_ones():
    """Open calls succeed, new ones fail with DRAINING, and health reports NOT_SERVING first."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        unary = server.inference.Query(QUESTION)
        stream = server.inference.Generate(STREAM)
        grammar = Grammar()
        grammar.feed(await stream.read())
        await until(lambda: len(engine.streams) == 2)
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        draining = asyncio.create_task(server.server.drain(60))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        failed = await refusal(server.inference.Query(QUESTION))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "DRAINING"
        assert "RetryInfo" in failed.details
        assert await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())

        for each in list(engine.streams.values()):
            events, result = solution(each.request.task)
            engine.feed(each, delta(each.request, *events), done(each.request, result))
        assert await draining
        assert (await unary).answer
        while (event := await stream.read()) is not grpc.aio.EOF:
            grammar.feed(event)
        grammar.end(ok=True)
        watch.cancel()


async def test_a_drain_lasts_no_longer_than_its_grace():
    """Calls that do not end in time are aborted when the server stops."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        call = server.inference.Query(QUESTION)
        await until(lambda: bool(engine.streams))
        assert not await server.server.drain(0.05)
        await server.server.stop()
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not engine.streams)
    assert engine.aborted == [engine.requests[0].request_id]


async def test_what_the_grace_does_not_end_is_told_so():
    """Unary calls, streams, uploads and sessions end with DRAINING and a time to retry after."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        calls = await one_of_each(server, engine)
        assert not await server.server.drain(0.05)
        stopping = asyncio.create_task(server.server.stop())
        for call in calls:
            failed = await refusal(last_message(call))
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "DRAINING"
            assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        await stopping
        await until(lambda: not engine.streams)


async def one_of_each(server, engine):
    """A call of every kind that the engine does not end."""
    stamp = media_pb2.FrameStamp(sequence=1)
    frame = session_pb2.Frame(stamp=stamp, image=image_message(), extra_tasks=[TASK])
    opening = session_pb2.SessionOpen(session_name="s")
    session = server.sessions.Session()
    await session.write(session_pb2.SessionRequest(open=opening))
    await session.write(session_pb2.SessionRequest(frame=frame))
    upload = server.images.PutImage()
    header = image_pb2.PutImageHeader(mime_type="image/png")
    await upload.write(image_pb2.PutImageRequest(header=header))
    stream = server.inference.Generate(STREAM)
    assert await stream.read()
    tasks = inference_pb2.RunTasksRequest(tasks=[TASK, TASK], image=image_message())
    unary = [server.inference.Query(QUESTION), server.inference.RunTasks(tasks)]
    await until(lambda: len(engine.streams) >= 4)
    return [session, stream, upload, *unary]


async def last_message(call):
    """Read to the end."""
    if not hasattr(call, "read"):
        return await call
    while await call.read() is not grpc.aio.EOF:
        pass
    return None


async def test_an_idle_server_drains_at_once():
    """It has nothing to wait for."""
    async with running(FakeEngine(answer)) as server:
        assert await server.server.drain(0)


# ---------------------------------------------------------------- watchdog

BLOCKED_EXIT = """
import threading
from legato_service import lifecycle as watchdog
watchdog.TIMEOUT = {timeout}
watchdog.arm_watchdog()
def a_library_that_blocks():
    threading.Event().wait({seconds})
a_library_that_blocks()
"""


def run(seconds: float, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a process whose shutdown takes `seconds`."""
    program = BLOCKED_EXIT.format(seconds=seconds, timeout=timeout)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_hanging_process_is_ended_with_its_stacks() -> None:
    """The exit code is 1, and stderr names the function that blocks."""
    ended = run(60, timeout=0.5)
    assert ended.returncode == 1
    assert "a_library_that_blocks" in ended.stderr


def test_a_process_that_exits_in_time_is_left_alone() -> None:
    """It writes nothing."""
    ended = run(0, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


# ---------------------------------------------------------------- orphans
# A service process that is the first of a container reaps what others leave.

# The child leaves orphans that live on for a moment, and exits with a code that its parent wants.
FIRST_PROCESS = """
import asyncio, ctypes, json, pathlib, sys
from legato_service import lifecycle as orphans

LEAVES_ORPHANS = (
    "import os, subprocess; [subprocess.Popen(['sleep', '0.1']) for _ in range(5)]; os._exit(7)"
)

def num_children():
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    return sum(len(each.read_text().split()) for each in tasks)

async def main(reaps):
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    assert orphans.inherits_orphans()
    reaping = asyncio.create_task(orphans.reap_orphans(0.05)) if reaps else None
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", LEAVES_ORPHANS)
    code = await child.wait()
    inherited = num_children()
    while num_children() if reaps else len(list(orphans._zombies())) < 5:
        await asyncio.sleep(0.01)
    print(json.dumps([code, inherited, num_children()]))

asyncio.run(main(sys.argv[1] == "reaps"))
"""


@pytest.mark.parametrize(("mode", "left"), [("reaps", 0), ("leaves them", 5)])
def test_orphans_are_reaped(mode, left):
    """All zombies of others go, and the exit code of an own child is not lost."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PROCESS, mode],
        check=True,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert json.loads(done.stdout) == [7, 5, left]


def test_an_ordinary_process_inherits_none():
    """Its orphans go to the first process, which is another."""
    assert not lifecycle.inherits_orphans()


def environment():
    """That of a child that imports what this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# ---------------------------------------------------------------- tuning
# The latency policy of a service process.

_TUNED = """
import os, sys, threading

cores = range(int(sys.argv[1]))
os.sched_getaffinity = lambda _: cores
from legato_engine.ipc import latency_policy
from legato_service import lifecycle as tuning

os.sched_setscheduler(0, int(sys.argv[2]), os.sched_param(0))
tuning.tune_process(latency_policy.resolve(sys.argv[3]))
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0)))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("cores", "setting", "given", "then"),
    [
        (2, "auto", os.SCHED_OTHER, os.SCHED_BATCH),
        (2, "auto", os.SCHED_IDLE, os.SCHED_IDLE),
        (16, "auto", os.SCHED_OTHER, os.SCHED_OTHER),
        (2, "low-latency", os.SCHED_OTHER, os.SCHED_OTHER),
        (16, "shared", os.SCHED_OTHER, os.SCHED_BATCH),
    ],
)
def test_threads_are_scheduled_by_the_policy(cores, setting, given, then):
    """Later threads inherit it; a policy that was set from outside stays."""
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _TUNED, str(cores), str(given), setting]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == then


def test_a_refused_scheduling_policy_is_ignored(monkeypatch):
    """Garbage collection is set all the same."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    thresholds = gc.get_threshold()
    try:
        lifecycle.tune_process(SHARED)
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == SERVICE_GC
    finally:
        gc.set_threshold(*thresholds)


# ---------------------------------------------------------------- console
# What a person sees of a start.


@pytest.mark.parametrize(
    ("address", "tasks", "command"),
    [
        (
            "127.0.0.1:50051",
            ("query", "detect"),
            "legato detect photo.jpg cup --server 127.0.0.1:50051",
        ),
        ("0.0.0.0:7", ("query",), 'legato query "Why is the sky blue?" --server 127.0.0.1:7'),
        ("robot:7", ("caption", "detect"), "legato detect photo.jpg cup --server robot:7"),
    ],
)
def test_the_example_is_one_that_the_model_answers(address, tasks, command):
    """At an address that a client on this host can call."""
    assert example(address, tasks) == command


def test_a_start_ends_with_what_is_served():
    """The address, the model and a command to try."""
    shown = io.StringIO()
    announcer = TerminalAnnouncer(Console(file=shown, force_terminal=True, width=100))
    announcer.ready("127.0.0.1:7", [MODEL])
    assert MODEL.name in shown.getvalue()
    assert example("127.0.0.1:7", MODEL.tasks) in shown.getvalue()


# ---------------------------------------------------------------- health and reflection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(server, service):
    """Return the status of a service."""
    return (await server.health.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", [INFERENCE, "legato.v1.ServerService"])
async def test_readiness_follows_the_engine(service):
    """A service is SERVING if and only if the engine is ready; the process is alive throughout."""
    engine = FakeEngine()
    async with running(engine) as server:
        for state in EngineState:
            engine.become(state)
            expected = SERVING if state is EngineState.READY else NOT_SERVING
            assert await check(server, service) == expected
            assert await check(server, "") == SERVING


async def test_a_service_that_is_not_here_is_not_found():
    """Check says NOT_FOUND, Watch says SERVICE_UNKNOWN."""
    async with running() as server:
        assert (await refusal(check(server, "legato.v1.NobodyService"))).code is (
            grpc.StatusCode.NOT_FOUND
        )
        call = server.health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await call.read()).status == UNKNOWN
        call.cancel()


async def test_watch_pushes_every_change():
    """A watcher gets the change when the engine is lost, and when it is back."""
    engine = FakeEngine()
    async with running(engine) as server:
        call = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await call.read()).status == SERVING
        engine.become(EngineState.LOST)
        assert (await call.read()).status == NOT_SERVING
        engine.become(EngineState.STARTING)
        engine.become(EngineState.READY)
        assert (await call.read()).status == SERVING
        call.cancel()


async def test_watches_end_with_the_server():
    """A server that stops waits for no watch: it ends them with OK."""
    async with running() as server:
        call = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await call.read()).status == SERVING
        await server.server.stop()
        while (response := await call.read()) is not grpc.aio.EOF:
            assert response.status == NOT_SERVING
        assert await call.code() is grpc.StatusCode.OK


async def test_all_statuses_are_listed():
    """Of every service, and of the process itself."""
    messages: Any = health_pb2  # whose stubs lack these
    async with running() as server:
        listed = await server.health.List(messages.HealthListRequest())
        assert listed.statuses[""].status == health_pb2.HealthCheckResponse.SERVING
        assert "legato.v1.InferenceService" in listed.statuses


# ---------------------------------------------------------------- reflection
# Server reflection, as grpcurl uses it.


async def ask(server, name=SERVICES[0], **request):
    """Send one request to the reflection service."""
    call = server.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )(iter([pb.ServerReflectionRequest(**request)]))
    return await call.read()


def files_of(response):
    """Return the files of a response by name, the requested one first."""
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in response.file_descriptor_response.file_descriptor_proto
    ]
    return {file.name: file for file in files}


@pytest.mark.parametrize("name", SERVICES)
async def test_services_are_listed(name):
    """Both versions of reflection list the services that exist, and no others."""
    async with running() as server:
        response = await ask(server, name, list_services="*")
    listed = [service.name for service in response.list_services_response.service]
    assert listed == [
        "grpc.health.v1.Health",
        *SERVICES,
        "inference.GRPCInferenceService",
        "legato.v1.AdminService",
        "legato.v1.ImageService",
        "legato.v1.InferenceService",
        "legato.v1.ServerService",
        "legato.v1.SessionService",
    ]


async def test_comments_are_included():
    """The file that reflection serves for Detect holds Detect's documentation."""
    async with running() as server:
        response = await ask(server, file_containing_symbol="legato.v1.InferenceService.Detect")
    files = files_of(response)
    file = files["legato/v1/inference.proto"]
    (service,) = file.service
    method = [method.name for method in service.method].index("Detect")
    (comment,) = [
        location.leading_comments
        for location in file.source_code_info.location
        if list(location.path) == [6, 0, 2, method]
    ]
    assert "Boxes every instance of an object" in comment


async def test_a_file_comes_with_all_it_imports():
    """A client can build the descriptors from one response."""
    async with running() as server:
        response = await ask(server, file_by_filename="legato/v1/inference.proto")
        again = await ask(server, file_containing_symbol="grpc.health.v1.Health")
    files = files_of(response)
    assert next(iter(files)) == "legato/v1/inference.proto"
    for file in files.values():
        assert set(file.dependency) <= set(files)
    assert [file.package for file in files_of(again).values()] == ["grpc.health.v1"]


async def test_an_unknown_symbol_does_not_end_the_stream():
    """The stream goes on after a request that fails."""
    async with running() as server:
        for request in (
            {"file_containing_symbol": "legato.v1.Nobody"},
            {"file_by_filename": "nobody.proto"},
            {"all_extension_numbers_of_type": "legato.v1.Image"},
        ):
            response = await ask(server, **request)
            assert response.error_response.error_code == 5
            assert response.HasField("original_request")


async def test_every_listed_service_can_be_described():
    """A client that describes what it was listed finds all of it, reflection itself included."""
    async with running() as server:
        response = await ask(server, list_services="*")
        for listed in response.list_services_response.service:
            files = files_of(await ask(server, file_containing_symbol=listed.name))
            package, _, name = listed.name.rpartition(".")
            assert any(
                file.package == package and name in [service.name for service in file.service]
                for file in files.values()
            ), listed.name
            for file in files.values():
                again = await ask(server, file_by_filename=file.name)
                assert not again.HasField("error_response"), file.name
