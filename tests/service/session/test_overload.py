"""More frames than the engine can process, heartbeats, credits and slow readers."""

import asyncio
import random

import grpc
import pytest
from legato.v1 import admin_pb2, session_pb2
from legato_service.session.core import FrameOutcome, FramePolicy

from tests.service.fakes import FakeEngine, begin, delta, done, hold, solution
from tests.service.harness import running
from tests.service.session.client import (
    DETECT,
    QUERY,
    SessionClient,
    opening,
    seconds,
    session,
    settled,
)
from tests.service.session.drive import Drive

SERVICE = 0.05  # seconds a frame takes
FRAMES = 2000


class Simulation:
    """A camera three times too fast for the engine, on a simulated clock."""

    def __init__(self, drive, chance):
        self._drive = drive
        self._chance = chance
        self._ends: dict[int, float] = {}
        self.ages: list[float] = []  # at which frames were answered

    def run(self):
        """Send all frames, each with a third of the time that it takes."""
        for _ in range(FRAMES):
            self._drive.send(*self._chance.choice([("a",), ("a", "b")]))
            for _ in range(10):
                self._work()
                self._talk()
                self._drive.now += SERVICE / 30

    def _work(self):
        drive = self._drive
        stopped = {sequence for sequence, _ in drive.runner.stopped}
        for sequence in drive.running():
            duration = SERVICE * self._chance.uniform(0.5, 1.5)
            end = self._ends.setdefault(sequence, drive.now + duration)
            if sequence in stopped or drive.now >= end:
                drive.end(sequence)

    def _talk(self):
        drive, chance = self._drive, self._chance
        if chance.random() < 0.02:
            drive.core.cancel(drive.sequence - chance.randrange(3))
        if chance.random() < 0.6:  # else the reader dawdles
            results = [each for each in drive.read() if isinstance(each, FrameOutcome)]
            self.ages += [drive.now - each.frame.captured_at for each in results if each.last]
        if chance.random() < 0.5:
            drive.core.grant(chance.randrange(1, 3))


@pytest.mark.parametrize("policy", FramePolicy)
@pytest.mark.parametrize("response_credits", [None, 2], ids=["unlimited", "credits"])
def test_answers_are_fresh_and_frames_are_counted(policy, response_credits):
    """P99 of the ages of results is below max_frame_age; each frame has exactly one outcome."""
    chance = random.Random(7)
    drive = Drive(policy=policy, max_frame_age=3 * SERVICE, response_credits=response_credits)
    simulation = Simulation(drive, chance)
    simulation.run()
    drive.finish()
    ages = sorted(simulation.ages)
    assert len(ages) > FRAMES / 10
    assert ages[int(len(ages) * 0.99)] < 3 * SERVICE
    if policy is not FramePolicy.PREEMPT:  # which lets every frame begin
        assert len(set(drive.ledger.dropped.values())) > 1
    assert len(drive.ledger.whole) + len(drive.ledger.dropped) == FRAMES


def take_time(engine, stream):
    """Respond after a while, unless the request was stopped."""
    request = stream.request
    begin(engine, stream)

    def end():
        if not stream.ended:
            events, result = solution(request.task)
            engine.feed(stream, delta(request, *events), done(request, result))

    asyncio.get_running_loop().call_later(random.uniform(0.002, 0.01), end)


async def misbehave(client, chance):
    """Send frames without waiting, cancel at random, and read with pauses."""
    for sequence in range(1, 201):
        await client.frame(sequence, must_run=chance.random() < 0.03)
        if chance.random() < 0.1:
            target = sequence - chance.randrange(3)
            await client.send(cancel=session_pb2.CancelFrame(sequence=max(target, 0)))
        if chance.random() < 0.05:
            await client.send(cancel=session_pb2.CancelFrame(task_id="count"))
        if chance.random() < 0.1:
            client.pause()
        if chance.random() < 0.3:
            client.resume()
        if chance.random() < 0.5:
            await client.send(grant=session_pb2.GrantCredits(responses=chance.randrange(1, 4)))
        await asyncio.sleep(chance.uniform(0, 0.004))
    client.resume()


@pytest.mark.parametrize("response_credits", [0, 3], ids=["unlimited", "credits"])
@pytest.mark.parametrize("deltas", [False, True], ids=["results", "deltas"])
@pytest.mark.parametrize("policy", session_pb2.FramePolicy.values()[1:])
async def test_both_sides_agree_over_the_wire(policy, deltas, response_credits):
    """Each frame that was sent has one outcome, and the server holds nothing at the end."""
    terms = {"frame_policy": policy, "stream_deltas": deltas, "response_credits": response_credits}
    async with (
        running(FakeEngine(take_time)) as server,
        session(
            server, standing_tasks=[DETECT, QUERY], max_frame_age=seconds(5), **terms
        ) as client,
    ):
        await misbehave(client, random.Random(policy))
        await client.done()
        await client.end()
        assert client.whole
        assert client.dropped or policy == session_pb2.FRAME_POLICY_PREEMPT
        assert len(client.whole) + len(client.dropped) == len(client.sent) == 200
        await settled(server)


# ---------------------------------------------------------------- slow clients

EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME


async def test_silence_is_broken_by_heartbeats():
    """The interval is at least 100 ms, whatever was requested; `index` counts heartbeats too."""
    async with running() as server, session(server, heartbeat_interval=seconds(0.001)) as client:
        assert client.opened.heartbeat_interval.ToMilliseconds() == 100
        await client.wait_for(lambda: client.kinds().count("heartbeat") >= 3)
        await client.done()
        await client.end()


async def test_an_idle_session_is_not_ended():
    """Neither the default deadlines nor the limit on slow readers end it."""
    async with (
        running(unary_deadline=0.3, stream_deadline=0.3, stall_timeout=0.3) as server,
        session(server, heartbeat_interval=seconds(0.1)) as client,
    ):
        await client.wait_for(lambda: client.kinds().count("heartbeat") >= 6)
        await client.done()
        await client.end()


async def test_a_deadline_of_the_client_ends_it():
    """The client's own deadline holds, and frees running work."""
    async with running(FakeEngine(hold)) as server:
        client = SessionClient(server.sessions.Session(timeout=0.5))
        await client.send(open=opening())
        await client.frame(1)
        assert (await client.failure()).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(server)


async def test_results_wait_for_credits():
    """Without credits results wait, the oldest become drops; a grant sends the rest."""
    async with (
        running() as server,
        session(server, frame_policy=EVERY, response_credits=1) as client,
    ):
        for sequence in range(1, 41):
            await client.frame(sequence)
            await client.wait_for(lambda: client.accepted[-1:] == [sequence])  # noqa: B023 - called before the next
        assert len(client.whole) == 1
        assert {each.reason for each in client.dropped.values()} == {
            session_pb2.DROP_REASON_OVERLOADED
        }
        await client.send(grant=session_pb2.GrantCredits(responses=2))
        await client.wait_for(lambda: len(client.whole) == 3)
        await client.done()
        await client.end()
        assert client.dropped
        await settled(server)


async def test_a_client_that_grants_nothing_is_disconnected():
    """ABORTED CLIENT_TOO_SLOW once results waited for the timeout."""
    async with running(stall_timeout=0.1) as server, session(server, response_credits=1) as client:
        await client.frame(1)
        await client.outcome(1)
        await client.frame(2)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.ABORTED
        assert failed.reason == "CLIENT_TOO_SLOW"
        await settled(server)


async def test_load_counts_the_sessions():
    """GetLoad counts the open sessions."""
    async with running() as server:
        async with session(server), session(server):
            load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
            assert load.sessions == 2
        await settled(server)
