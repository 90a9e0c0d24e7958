"""AdminService: the engine's load, as an operator sees it."""

import grpc
import pytest
from legato.v1 import admin_pb2
from legato_engine.client import EngineState
from legato_engine.messages import Load, StepReport

from tests.service.fakes import FakeEngine
from tests.service.harness import refusal, running

ASK = admin_pb2.GetLoadRequest()


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


async def test_load_tells_what_a_decode_step_costs():
    """Each part of the engine's report arrives in its own field, and none is made up without it."""
    report = StepReport(
        num_steps=256,
        num_tokens=1000,
        rows=7.5,
        step_ms=4.0,
        forward_ms=3.0,
        sampling_ms=0.5,
        bookkeeping_ms=1.25,
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
    assert load.decode_steps == admin_pb2.DecodeSteps(
        steps=256,
        tokens=1000,
        rows=7.5,
        step_ms=4.0,
        forward_ms=3.0,
        sampling_ms=0.5,
        bookkeeping_ms=1.25,
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
        (EngineState.DRAINING, "draining"),
        (EngineState.STOPPED, "draining"),
    ],
)
async def test_load_is_told_without_an_engine(state, word):
    """GetLoad answers in every state, with the contract's word for it and no guess of the wait."""
    engine = FakeEngine()
    engine.state = state
    async with running(engine) as server:
        load = await server.admin.GetLoad(ASK)
    assert load.engine_state == word
    assert load.kv_used_ratio == 0
    assert not load.HasField("estimated_wait")


async def test_an_engine_that_stands_still_is_stuck():
    """Pending work and a step that has not moved for `stuck_after` is called stuck."""
    engine = FakeEngine()
    engine.load = Load(running=1)
    async with running(engine, stuck_after=0.0) as server:
        assert (await server.admin.GetLoad(ASK)).engine_state == "stuck"


@pytest.mark.parametrize("method", ["Abort", "Drain"])
async def test_what_changes_things_is_not_built(method):
    """Abort and Drain are UNIMPLEMENTED, and say so."""
    async with running() as server:
        failed = await refusal(server.channel.unary_unary(f"/legato.v1.AdminService/{method}")(b""))
    assert failed.code is grpc.StatusCode.UNIMPLEMENTED
    assert f"AdminService.{method} is not built" in failed.message
