"""AdminService: the load, abort, drain, the timeline, and its listeners."""

import asyncio
import os
import socket
import stat
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, server_pb2, task_pb2
from legato.v1 import admin_pb2 as pb
from legato_engine.client.monitor import EngineState
from legato_engine.client.timeline_watch import MAX_UNREAD
from legato_engine.errors import QueueFull
from legato_engine.ipc.messages import LaunchSpan, PipelineStats, SchedulerLoad, TimelineBatch
from legato_engine.types import RequestKey
from legato_service.config import ServiceConfig
from legato_service.config import check as check_config

from tests.grammar import check
from tests.service.fakes import FakeEngine, answer, begin, hold, refuse
from tests.service.harness import image_message, refusal, running, until
from tests.service.session.client import session

ASK = pb.GetLoadRequest()
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))


async def test_load_is_the_last_heartbeats():
    """Counts, the share of the KV cache, the step and the wait are those that the engine sent."""
    engine = FakeEngine()
    engine.load = SchedulerLoad(running=3, waiting=2, inflight=2, pages_used=25, pages_total=100)
    engine.step, engine.estimated_wait = 41, 1.5
    async with running(engine) as server:
        load = await server.admin.GetLoad(ASK)
    assert (load.running, load.waiting, load.sessions) == (3, 2, 0)
    assert load.kv_used_ratio == 0.25
    assert load.engine_step == 41
    assert load.estimated_wait.ToMilliseconds() == 1500
    assert load.engine_state == "serving"


async def test_load_has_the_costs_of_decode_steps():
    """Each part of the engine's statistics has its own field; without them there is none."""
    report = PipelineStats(
        num_steps=256,
        num_tokens=1000,
        rows=7.5,
        step_ms=4.0,
        forward_ms=3.0,
        sampling_ms=0.5,
        bookkeeping_ms=1.25,
        mask_ms=0.5,
        wait_ms=2.0,
        idle_ms=0.125,
        blocking_ms=5.0,
        zombie_ratio=0.0625,
        predicted_gain=0.25,
    )
    engine = FakeEngine()
    async with running(engine) as server:
        assert not (await server.admin.GetLoad(ASK)).HasField("decode_steps")
        engine.load = SchedulerLoad(running=8, decode_steps=report)
        load = await server.admin.GetLoad(ASK)
    assert load.decode_steps == pb.DecodeSteps(
        steps=256,
        tokens=1000,
        rows=7.5,
        step_ms=4.0,
        forward_ms=3.0,
        sampling_ms=0.5,
        bookkeeping_ms=1.25,
        mask_ms=0.5,
        wait_ms=2.0,
        idle_ms=0.125,
        blocking_ms=5.0,
        zombie_ratio=0.0625,
        predicted_gain=0.25,
    )


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (EngineState.STARTING, "starting"),
        (EngineState.LOST, "lost"),
        (EngineState.HUNG, "stuck"),
        (EngineState.DRAINING, "draining"),
        (EngineState.STOPPED, "draining"),
    ],
)
async def test_load_needs_no_engine(state, word):
    """GetLoad responds in every state, with the contract's name of it and no estimated wait."""
    engine = FakeEngine()
    engine.state = state
    async with running(engine) as server:
        load = await server.admin.GetLoad(ASK)
    assert load.engine_state == word
    assert load.kv_used_ratio == 0
    assert not load.HasField("estimated_wait")


def query_request(question="How many?", request_id="mine"):
    """Return a Query with an id."""
    options = inference_pb2.RequestOptions(request_id=request_id)
    return inference_pb2.QueryRequest(question=question, options=options)


def drain_in(seconds):
    """Return a Drain with that grace."""
    return pb.DrainRequest(grace=duration_pb2.Duration(seconds=seconds))


def generate_request(request_id="mine"):
    """Return a Generate with an id."""
    options = inference_pb2.RequestOptions(request_id=request_id)
    return inference_pb2.GenerateRequest(task=TASK, options=options)


async def events(call):
    """Read a stream that ends well, and check its grammar."""
    found = []
    while (event := await call.read()) is not grpc.aio.EOF:
        found.append(event)
    check(found, ok=True)
    return found


async def settled(server):
    """Wait until nothing is in flight and the engine holds nothing."""
    await until(lambda: not server.engine.streams and len(server.server.requests) == 0)
    assert len(server.engine.blobs) == 0


def counts(response):
    """Return the counts of an Abort."""
    return response.aborted, response.already_finished


@pytest.mark.parametrize("script", [hold, begin], ids=["waiting", "running"])
async def test_an_aborted_stream_ends_with_its_partial_result(script):
    """Generate ends with `finished`, CANCELLED, and OK, whether it waited or ran."""
    async with running(FakeEngine(script)) as server:
        call = server.inference.Generate(generate_request())
        await until(lambda: bool(server.engine.streams))
        assert counts(await server.admin.Abort(pb.AbortRequest(request_id="mine"))) == (1, 0)
        last = (await events(call))[-1].finished
        assert last.info.finish_reason == task_pb2.FINISH_REASON_CANCELLED
        assert last.result.HasField("query")
        await settled(server)


@pytest.mark.parametrize("script", [hold, begin], ids=["waiting", "running"])
@pytest.mark.parametrize("rpc", ["Query", "RunTasks"])
async def test_an_aborted_unary_call_is_preempted(rpc, script):
    """Unary calls and joined ones end with ABORTED PREEMPTED, and no reply is kept."""
    asks = {
        "Query": query_request(),
        "RunTasks": inference_pb2.RunTasksRequest(
            tasks=[TASK, TASK], options=inference_pb2.RequestOptions(request_id="mine")
        ),
    }
    async with running(FakeEngine(script)) as server:
        calls = [getattr(server.inference, rpc)(asks[rpc]) for _ in range(2)]
        await until(
            lambda: server.server.idempotency_cache.num_waiting == 2 and bool(server.engine.streams)
        )
        assert counts(await server.admin.Abort(pb.AbortRequest(request_id="mine"))) == (1, 0)
        for call in calls:
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.ABORTED
            assert failed.reason == "PREEMPTED"
        await settled(server)
        server.engine.script = answer
        assert await getattr(server.inference, rpc)(asks[rpc])


async def test_a_call_is_aborted_before_it_reaches_the_engine(monkeypatch):
    """A call that is stopped during the check of its image ends as stopped."""
    entered, go_on = asyncio.Event(), asyncio.Event()
    async with running(FakeEngine(hold)) as server:
        intake = server.server.images
        look = intake.check

        async def slow(image):
            entered.set()
            await go_on.wait()
            return await look(image)

        monkeypatch.setattr(intake, "check", slow)
        shown = query_request()
        shown.image.CopyFrom(image_message())
        unary = server.inference.Query(shown)
        await entered.wait()
        stream = server.inference.Generate(generate_request("other"))
        await until(lambda: len(server.server.requests) == 2)
        assert counts(await server.admin.Abort(pb.AbortRequest(all=True))) == (2, 0)
        assert counts(await server.admin.Abort(pb.AbortRequest(all=True))) == (0, 0)
        go_on.set()
        assert (await refusal(unary)).reason == "PREEMPTED"
        finished = (await events(stream))[-1].finished
        assert finished.info.finish_reason == task_pb2.FINISH_REASON_CANCELLED
        await settled(server)


async def test_abort_names_one_and_spares_the_others():
    """Only the request of that id is stopped; an unknown id stops nothing."""
    async with running(FakeEngine(hold)) as server:
        first, second = (
            server.inference.Query(query_request()),
            server.inference.Query(query_request("?", "other")),
        )
        await until(lambda: len(server.engine.streams) == 2)
        assert counts(await server.admin.Abort(pb.AbortRequest(request_id="nobody"))) == (0, 0)
        assert counts(await server.admin.Abort(pb.AbortRequest(request_id="mine"))) == (1, 0)
        assert (await refusal(first)).reason == "PREEMPTED"
        assert set(server.engine.streams) == {RequestKey("other")}
        answer(server.engine, server.engine.streams[RequestKey("other")])
        assert (await second).answer


async def test_what_has_ended_is_no_error():
    """Requests that ended before are counted, including those with the server's own ids."""
    async with running() as server:
        ended = (await server.inference.Query(inference_pb2.QueryRequest(question="?"))).info
        for expected in ((0, 1), (0, 1)):
            request = pb.AbortRequest(request_id=ended.request_id)
            assert counts(await server.admin.Abort(request)) == expected


async def test_an_operator_may_name_the_tenant():
    """Without a tenant an id matches every tenant's; with one, only that tenant's."""
    async with running(FakeEngine(hold)) as server:
        calls = {
            tenant: server.inference.Query(query_request(), metadata=(("legato-tenant", tenant),))
            for tenant in "abc"
        }
        await until(lambda: len(server.engine.streams) == 3)
        request = pb.AbortRequest(request_id="mine")
        of_a = await server.admin.Abort(request, metadata=(("legato-tenant", "a"),))
        assert counts(of_a) == (1, 0)
        assert (await refusal(calls["a"])).reason == "PREEMPTED"
        await until(lambda: len(server.server.requests) == 2)
        assert counts(await server.admin.Abort(request)) == (2, 1)
        for tenant in "bc":
            assert (await refusal(calls[tenant])).reason == "PREEMPTED"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.AbortRequest(), "target"),
        (pb.AbortRequest(all=False), "all"),
        (pb.AbortRequest(request_id=""), "request_id"),
        (pb.AbortRequest(session_id=""), "session_id"),
    ],
)
async def test_abort_needs_a_target(request_, field):
    """INVALID_FIELD names what is missing."""
    async with running() as server:
        failed = await refusal(server.admin.Abort(request_))
    assert failed.reason == "INVALID_FIELD"
    assert failed.details["BadRequest"].field_violations[0].field == field


async def test_sessions_are_counted_and_aborted():
    """GetLoad counts the sessions; Abort ends one, or all with all requests."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server) as first,
        session(server) as second,
    ):
        call = server.inference.Query(query_request())
        await until(lambda: bool(server.engine.streams))
        assert (await server.admin.GetLoad(ASK)).sessions == 2
        one = pb.AbortRequest(session_id=first.opened.session_id)
        assert counts(await server.admin.Abort(one)) == (1, 0)
        assert (await first.failure()).reason == "PREEMPTED"
        await until(lambda: len(server.server.sessions) == 1)
        assert counts(await server.admin.Abort(one)) == (0, 0)
        assert (await server.admin.GetLoad(ASK)).sessions == 1
        assert counts(await server.admin.Abort(pb.AbortRequest(all=True))) == (2, 0)
        assert (await refusal(call)).reason == "PREEMPTED"
        assert (await second.failure()).reason == "PREEMPTED"
        await until(lambda: len(server.server.sessions) == 0)
        assert (await server.admin.GetLoad(ASK)).sessions == 0


async def test_drain_returns_at_once_with_what_is_left():
    """Health changes, new work is refused, running work ends well; the counts are the engine's."""
    engine = FakeEngine(begin)
    engine.load = SchedulerLoad(running=2, waiting=1)
    async with running(engine) as server, session(server), session(server):
        call = server.inference.Query(query_request())
        await until(lambda: bool(engine.streams))
        left = await server.admin.Drain(drain_in(60))
        assert (left.running, left.waiting, left.sessions) == (2, 1, 2)
        assert (await server.admin.GetLoad(ASK)).engine_state == "draining"
        refused = await refusal(server.inference.Query(query_request("?", "late")))
        assert refused.reason == "DRAINING"
        answer(engine, engine.streams[RequestKey("mine")])
        assert (await call).answer
        assert await server.server.shutdown.wait()


async def test_draining_again_only_shortens_the_grace():
    """A longer grace changes nothing; a shorter one ends the current wait."""
    async with running(FakeEngine(begin)) as server:
        call = server.inference.Query(query_request())
        await until(lambda: bool(server.engine.streams))
        await server.admin.Drain(drain_in(600))
        waiting = asyncio.create_task(server.server.shutdown.wait())
        await server.admin.Drain(drain_in(6000))
        assert server.server.shutdown.time_left <= 600
        assert not waiting.done()
        await server.admin.Drain(drain_in(0))
        assert not await waiting
        call.cancel()


async def test_a_drain_without_grace_takes_the_servers():
    """An absent grace is the setting's; a negative one is refused, and no drain begins."""
    async with running(drain_grace=20.0) as server:
        failed = await refusal(server.admin.Drain(drain_in(-1)))
        assert failed.details["BadRequest"].field_violations[0].field == "grace"
        assert (await server.admin.GetLoad(ASK)).engine_state == "serving"
        await server.admin.Drain(pb.DrainRequest())
        assert 0 < server.server.shutdown.time_left <= 20


async def test_admin_answers_under_full_load():
    """With every place taken the operator sees it, and can abort requests."""
    engine = FakeEngine(hold)
    engine.load = SchedulerLoad(running=16, waiting=256)
    async with running(engine) as server:
        calls = [server.inference.Query(query_request("?", f"r{n}")) for n in range(50)]
        await until(lambda: len(engine.streams) == 50)
        engine.script = refuse(QueueFull("full"))
        assert (await refusal(server.inference.Query(query_request()))).reason == "QUEUE_FULL"
        assert (await server.admin.GetLoad(ASK)).waiting == 256
        assert counts(await server.admin.Abort(pb.AbortRequest(all=True))) == (50, 0)
        for call in calls:
            assert (await refusal(call)).reason == "PREEMPTED"
        await settled(server)


# ---------------------------------------------------------------- timeline

SPAN = LaunchSpan("device compute", "forward", 5_000_000_000, 2_000, 7, "decode", 3, 1, 2, 4)
STEPS = PipelineStats(
    num_steps=9,
    num_tokens=20,
    rows=2.0,
    step_ms=5.0,
    forward_ms=4.0,
    sampling_ms=0.5,
    bookkeeping_ms=0.5,
    wait_ms=3.0,
    idle_ms=0.25,
    blocking_ms=6.0,
    zombie_ratio=0.0,
    predicted_gain=0.25,
    observed_gain=0.125,
)


async def test_spans_and_gains_arrive_while_a_caller_watches():
    """A batch is one message; the engine is asked to begin, and to end when the caller leaves."""
    async with running() as server:
        server.engine.load = SchedulerLoad(decode_steps=STEPS)
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        first = await call.read()
        assert (len(first.spans), first.decode_steps.steps) == (0, 9)
        await until(lambda: server.engine.watched == [True])
        server.engine.timeline.deliver(TimelineBatch(spans=(SPAN, SPAN), decode_steps=STEPS))
        message = await call.read()
        assert len(message.spans) == 2
        assert message.spans[0] == admin_pb2.TimelineSpan(
            lane="device compute",
            name="forward",
            start_ns=5_000_000_000,
            duration_ns=2_000,
            launch=7,
            kind="decode",
            rows=3,
            riding=1,
            zombies=2,
            tokens=4,
        )
        assert message.decode_steps.predicted_gain == 0.25
        assert message.decode_steps.observed_gain == 0.125
        call.cancel()
        await until(lambda: server.engine.watched == [True, False])


async def test_a_watcher_learns_what_it_lost_and_whose_launches_come():
    """Launches are numbered in a row; those of an engine that follows a lost one count anew."""
    async with running() as server:
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        first = await call.read()
        assert (first.engine_started_ns, first.lost_launches, first.pipeline_depth) == (0, 0, 0)
        await until(lambda: server.engine.watched == [True])
        for number, started in ((7, 100), (10, 100), (0, 200)):
            span = msgspec.structs.replace(SPAN, launch=number)
            server.engine.timeline.deliver(
                TimelineBatch(spans=(span,), started=started, pipeline_depth=2)
            )
        found = [await call.read() for _ in range(3)]
        assert [each.lost_launches for each in found] == [0, 2, 0]
        assert [each.engine_started_ns for each in found] == [100, 100, 200]
        assert {each.pipeline_depth for each in found} == {2}
        call.cancel()


async def test_a_slow_watcher_is_told_what_it_lost():
    """What it reads and what it lost are all launches; the newest are never among the lost."""
    count = 3 * MAX_UNREAD
    async with running(channel_options=[("grpc.http2.lookahead_bytes", 0)]) as server:
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        await call.read()
        await until(lambda: server.engine.watched == [True])
        for number in range(count):
            span = msgspec.structs.replace(SPAN, launch=number, kind="decode" * 20_000)
            server.engine.timeline.deliver(TimelineBatch(spans=(span,), started=1))
            await asyncio.sleep(0)
        found: list[int] = []
        lost = 0
        while not found or found[-1] != count - 1:
            message = await call.read()
            found += [each.launch for each in message.spans]
            lost += message.lost_launches
        assert found == sorted(set(found))
        assert found[0] + len(found) + lost == count
        assert lost > 0
        call.cancel()


async def test_the_depth_is_set_on_every_engine():
    """Where the server allows it, and only 1 and 2."""
    async with running(depth_switch=True) as server:
        await server.admin.SetPipelineDepth(admin_pb2.SetPipelineDepthRequest(depth=1))
        assert server.engine.depths == [1]
        for wrong in (0, 3):
            request = admin_pb2.SetPipelineDepthRequest(depth=wrong)
            found = await refusal(server.admin.SetPipelineDepth(request))
            assert found.reason == "INVALID_FIELD"
            assert found.details["BadRequest"].field_violations[0].field == "depth"
        assert server.engine.depths == [1]
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "pipeline_depth" in info.capabilities


async def test_the_depth_is_the_servers_own_unless_it_allows_changes():
    """By default there is no such method."""
    async with running() as server:
        request = admin_pb2.SetPipelineDepthRequest(depth=1)
        found = await refusal(server.admin.SetPipelineDepth(request))
        assert found.code is grpc.StatusCode.UNIMPLEMENTED
        assert server.engine.depths == []
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "pipeline_depth" not in info.capabilities


async def test_the_duration_ends_the_call():
    """Without a batch, too."""
    async with running() as server:
        request = admin_pb2.WatchTimelineRequest(duration=duration_pb2.Duration(nanos=10_000_000))
        async with asyncio.timeout(60):
            messages = [message async for message in server.admin.WatchTimeline(request)]
        assert messages == [admin_pb2.WatchTimelineResponse()]
        assert server.engine.watched == [True, False]


async def test_a_duration_must_be_positive():
    """The field is named."""
    async with running() as server:
        request = admin_pb2.WatchTimelineRequest(duration=duration_pb2.Duration())
        found = await refusal(server.admin.WatchTimeline(request).read())
    assert found.reason == "INVALID_FIELD"
    assert found.details["BadRequest"].field_violations[0].field == "duration"


# ---------------------------------------------------------------- admin listener
# Listeners of AdminService: the main one, its own, or none.

QUESTION = inference_pb2.QueryRequest(question="How many?")
ADMIN, INFERENCE = "legato.v1.AdminService", "legato.v1.InferenceService"


@pytest.fixture(params=["tcp", "unix"])
def place(request, tmp_path):
    """Return an address for the operator."""
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/admin.sock"


async def listed(channel):
    """Return the services that reflection lists."""
    method = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return {service.name for service in (await call.read()).list_services_response.service}


async def unimplemented(channel):
    """Check that AdminService and its reflection are not on this channel."""
    failed = await refusal(admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK))
    return failed.code is grpc.StatusCode.UNIMPLEMENTED and ADMIN not in await listed(channel)


@pytest.fixture
def runtime_folder(tmp_path, monkeypatch):
    """The folder for this user's sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


async def test_by_default_it_is_on_a_socket_of_this_user(runtime_folder):
    """The main listener has it not, although only this machine reaches that."""
    async with running(admin_listen="") as server:
        assert await unimplemented(server.channel)
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" not in info.capabilities
        path = runtime_folder / "legato" / f"admin-{server.port}.sock"
        assert server.server.listeners.admin_address == f"unix:{path}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel:
            assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None
    assert not path.exists(), "a closed listener leaves no socket"


async def test_the_socket_of_a_server_that_died_is_replaced(runtime_folder):
    """Its file is still there, and nothing listens on it."""
    async with running(admin_listen="") as server:
        port, path = server.port, server.server.listeners.admin_address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    async with (
        running(admin_listen="", listen=f"127.0.0.1:{port}") as server,
        grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel,
    ):
        assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None


async def test_the_socket_of_a_running_server_is_not_taken(tmp_path):
    """GRPC itself would unlink it."""
    place = f"unix:{tmp_path}/admin.sock"
    async with running(admin_listen=place) as server:
        with pytest.raises(OSError, match="another server"):
            async with running(admin_listen=place):
                pass
        async with grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel:
            assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
async def test_a_folder_that_others_can_enter_has_no_socket(runtime_folder, mode):
    """The server serves without AdminService and can say why."""
    folder = runtime_folder / "legato"
    folder.mkdir()
    folder.chmod(mode)
    async with running(admin_listen="") as server:
        assert server.server.listeners.admin_address == ""
        assert "others can enter" in server.server.listeners.admin_problem
        assert (await server.inference.Query(QUESTION)).answer


async def test_it_is_on_the_main_listener_if_asked_for():
    """The capability is announced."""
    async with running(admin_listen="same") as server:
        assert await server.admin.GetLoad(ASK) is not None
        assert {ADMIN, INFERENCE} <= await listed(server.channel)
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" in info.capabilities
        assert server.server.listeners.admin_address == f"127.0.0.1:{server.port}"


async def test_it_can_be_off():
    """No listener has it."""
    async with running(admin_listen="off") as server:
        assert await unimplemented(server.channel)
        assert server.server.listeners.admin_address == ""


async def test_its_own_listener_has_it_alone(place):
    """It has admin, health and reflection only; the main listener has no admin."""
    async with running(admin_listen=place) as server:
        assert await unimplemented(server.channel)
        assert (await server.inference.Query(QUESTION)).answer
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" not in info.capabilities
        async with grpc.aio.insecure_channel(server.server.listeners.admin_address) as opened:
            channel: Any = opened  # untyped, as in the harness
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            assert (await stub.GetLoad(ASK)).engine_state == "serving"
            health: Any = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest(service=INFERENCE))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            names = await listed(channel)
            assert ADMIN in names
            assert INFERENCE not in names
            failed = await refusal(channel.unary_unary(f"/{INFERENCE}/Query")(b""))
            assert failed.code is grpc.StatusCode.UNIMPLEMENTED
            failed = await refusal(stub.Abort(admin_pb2.AbortRequest()))
            assert failed.reason == "INVALID_FIELD", "errors are typed here as well"


async def test_a_listener_of_its_own_serves_beside_an_open_one(place):
    """The operator has AdminService although the main listener is open to all."""
    async with running(listen="0.0.0.0:0", insecure=True, admin_listen=place) as server:
        assert await unimplemented(server.channel)
        async with grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel:
            assert (await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK)).engine_step == 0


async def test_the_socket_is_its_owners_alone(tmp_path):
    """No other user can connect, and the umask is unchanged."""
    path = tmp_path / "admin.sock"
    before = os.umask(0o022)
    try:
        async with running(admin_listen=f"unix:{path}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


async def test_a_taken_admin_address_is_an_error():
    """The server does not start without its admin listener."""
    async with running() as server:
        with pytest.raises(OSError, match="cannot listen"):
            async with running(admin_listen=f"127.0.0.1:{server.port}"):
                pass


TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
TOKENS = {"tokens": "tokens.toml"}


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"admin_listen": "127.0.0.1:0"}, True),
        ({"admin_listen": "unix:/run/legato.sock"}, True),
        ({"admin_listen": "same"}, True),
        ({"admin_listen": "off"}, True),
        ({"admin_listen": "nowhere", "insecure": True}, False),
        ({"admin_listen": "0.0.0.0:0"}, False),
        ({"admin_listen": "0.0.0.0:0", "insecure": True}, True),
        ({"admin_listen": "0.0.0.0:0", **TLS, **TOKENS}, True),
        ({"listen": "unix:/run/legato.sock"}, False),
        ({"listen": "0.0.0.0:0"}, False),
        ({"listen": "0.0.0.0:0", "insecure": True}, True),
        ({"listen": "0.0.0.0:0", "insecure": True, "admin_listen": "same"}, False),
        ({"listen": "0.0.0.0:0", **TLS}, False),
        ({"listen": "0.0.0.0:0", **TOKENS}, False),
        ({"listen": "0.0.0.0:0", **TOKENS, "insecure": True}, True),
        ({"listen": "0.0.0.0:0", **TLS, **TOKENS}, True),
        ({"listen": "0.0.0.0:0", **TLS, **TOKENS, "admin_listen": "same"}, True),
        ({"listen": "0.0.0.0:0", **TLS, "tls_client_ca": "ca.pem"}, True),
        ({"tls_cert": "cert.pem"}, False),
        ({"tls_key": "key.pem"}, False),
        ({"tls_client_ca": "ca.pem"}, False),
        ({"health_listen": "0.0.0.0:0"}, True),
        ({"health_listen": "nowhere"}, False),
    ],
)
def test_an_unprotected_listener_is_asked_for_by_name(settings, accepted):
    """A listener that other machines reach has TLS and credentials, or needs --insecure."""
    config = ServiceConfig(**{"listen": "127.0.0.1:0", **settings})
    if accepted:
        check_config(config)
    else:
        with pytest.raises(ValueError, match=r"--[a-z-]+"):
            check_config(config)
