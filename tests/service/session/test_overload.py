"""Three times more frames than the engine can process, random cancels, and slow readers."""

import asyncio
import random

import pytest
from legato.v1 import session_pb2
from legato_service.session.core import FramePolicy, Result

from tests.service.fakes import FakeEngine, begin, delta, done, solution
from tests.service.harness import running
from tests.service.session.client import DETECT, QUERY, seconds, session, settled
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
            results = [each for each in drive.read() if isinstance(each, Result)]
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
