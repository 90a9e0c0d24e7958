"""AdminService: the load, abort and drain."""

import asyncio

import grpc
import pytest
from google.protobuf import duration_pb2
from legato.v1 import admin_pb2 as pb
from legato.v1 import inference_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.errors import QueueFull
from legato_engine.ipc.messages import Load, PipelineStats
from legato_engine.types import RequestKey
from legato_service.session.session import SessionRegistry

from tests.grammar import check
from tests.service.fakes import FakeEngine, answer, begin, hold, refuse
from tests.service.harness import image_message, refusal, running, until

ASK = pb.GetLoadRequest()
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))


async def test_load_is_the_last_heartbeats():
    """Counts, the share of the KV cache, the step and the wait are those that the engine sent."""
    engine = FakeEngine()
    engine.load = Load(running=3, waiting=2, inflight=2, pages_used=25, pages_total=100)
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
        engine.load = Load(running=8, decode_steps=report)
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
    await until(lambda: not server.engine.streams and server.server.num_in_flight == 0)
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
        await until(lambda: server.server.num_in_flight == 2)
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
        await until(lambda: server.server.num_in_flight == 2)
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


class FakeSessions(SessionRegistry):
    """Two sessions."""

    def __init__(self):
        super().__init__(2)
        self.ids = {"s-1", "s-2"}

    def __len__(self):
        return len(self.ids)

    def abort(self, target):
        """End one."""
        known = target.caller_id in self.ids
        self.ids.discard(target.caller_id)
        return int(known)

    def abort_all(self):
        """End all."""
        count = len(self.ids)
        self.ids.clear()
        return count


async def test_sessions_are_counted_and_aborted():
    """GetLoad counts the sessions; Abort ends one, or all with all requests."""
    async with running(FakeEngine(hold), sessions=FakeSessions()) as server:
        call = server.inference.Query(query_request())
        await until(lambda: bool(server.engine.streams))
        assert (await server.admin.GetLoad(ASK)).sessions == 2
        one = pb.AbortRequest(session_id="s-1")
        assert counts(await server.admin.Abort(one)) == (1, 0)
        assert counts(await server.admin.Abort(one)) == (0, 0)
        assert (await server.admin.GetLoad(ASK)).sessions == 1
        assert counts(await server.admin.Abort(pb.AbortRequest(all=True))) == (2, 0)
        assert (await server.admin.GetLoad(ASK)).sessions == 0
        assert (await refusal(call)).reason == "PREEMPTED"


async def test_drain_returns_at_once_with_what_is_left():
    """Health changes, new work is refused, running work ends well; the counts are the engine's."""
    engine = FakeEngine(begin)
    engine.load = Load(running=2, waiting=1)
    async with running(engine, sessions=FakeSessions()) as server:
        call = server.inference.Query(query_request())
        await until(lambda: bool(engine.streams))
        left = await server.admin.Drain(drain_in(60))
        assert (left.running, left.waiting, left.sessions) == (2, 1, 2)
        assert (await server.admin.GetLoad(ASK)).engine_state == "draining"
        refused = await refusal(server.inference.Query(query_request("?", "late")))
        assert refused.reason == "DRAINING"
        answer(engine, engine.streams[RequestKey("mine")])
        assert (await call).answer
        assert await server.server.wait_drained()


async def test_draining_again_only_shortens_the_grace():
    """A longer grace changes nothing; a shorter one ends the current wait."""
    async with running(FakeEngine(begin)) as server:
        call = server.inference.Query(query_request())
        await until(lambda: bool(server.engine.streams))
        await server.admin.Drain(drain_in(600))
        waiting = asyncio.create_task(server.server.wait_drained())
        await server.admin.Drain(drain_in(6000))
        assert server.server.grace_left <= 600
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
        assert 0 < server.server.grace_left <= 20


async def test_admin_answers_under_full_load():
    """With every place taken the operator sees it, and can abort requests."""
    engine = FakeEngine(hold)
    engine.load = Load(running=16, waiting=256)
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
