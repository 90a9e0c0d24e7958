"""The rules of a session without a server; sessions of more frames than an engine can process."""

import asyncio
import collections
import math
import random

import grpc
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from legato.v1 import admin_pb2, session_pb2
from legato_engine.errors import ClientTooSlow, InternalError, SessionOutOfOrder
from legato_engine.ipc.messages import OutputDelta, QueuePosition
from legato_engine.types import ObjectEvent, RequestKey, TextEvent
from legato_service.session.core import (
    MAX_UNREAD,
    Accepted,
    CaptureClock,
    Dropped,
    DropReason,
    Frame,
    FrameOutcome,
    FrameOutput,
    FramePolicy,
    GoAwayNotice,
    SessionCore,
    SessionSettings,
)

from tests.service.fakes import BOX, FakeEngine, begin, delta, done, hold, solution
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

# ---------------------------------------------------------------- a core driven by hand

# The test is its runner, and a ledger checks both sides.

OUTCOME = InternalError("what a task says at its end is nothing to the core")


class ManualRunner:
    """Records the core's orders."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self.stopped: list[tuple[int, int]] = []

    def start(self, frame: Frame) -> None:
        """Record a frame that runs."""
        self.running.append(frame)

    def stop(self, frame: Frame, index: int) -> None:
        """Record a task that should end."""
        assert frame in self.running
        self.stopped.append((frame.sequence, index))

    def abort(self, frame: Frame) -> None:
        """Remove a frame."""
        if frame in self.running:
            self.running.remove(frame)


class Ledger:
    """Checks the messages to the client one by one."""

    def __init__(self, terms: SessionSettings) -> None:
        self._terms = terms
        self.sent: dict[int, Frame] = {}
        self.results: dict[int, list[int]] = collections.defaultdict(list)
        self.whole: set[int] = set()
        self.dropped: dict[int, DropReason] = {}
        self.accepted: set[int] = set()
        self.spent = 0

    def check(self, message: object, now: float) -> None:
        """Check the next message."""
        match message:
            case Accepted():
                assert message.sequence not in self.accepted | set(self.results) | set(self.dropped)
                self.accepted.add(message.sequence)
            case Dropped():
                assert message.sequence not in set(self.results) | set(self.dropped)
                assert message.sequence in self.sent
                self.dropped[message.sequence] = message.reason
                assert message.dropped_total == len(self.dropped)
            case FrameOutput():
                self.spent += 1
                assert message.frame.sequence not in self.dropped
                assert message.index not in self.results.get(message.frame.sequence, [])
            case FrameOutcome():
                self._check_result(message, now)
            case _:
                assert isinstance(message, GoAwayNotice)

    def _check_result(self, message: FrameOutcome[Frame], now: float) -> None:
        frame, num_sent = message.frame, self.results[message.frame.sequence]
        self.spent += 1
        assert frame.sequence not in self.dropped
        assert message.index not in num_sent
        if not num_sent and not frame.must_run:
            assert now - frame.captured_at < self._terms.max_frame_age
        num_sent.append(message.index)
        assert message.last == (len(num_sent) == len(frame.task_ids))
        if message.last:
            self.whole.add(frame.sequence)

    def close(self) -> None:
        """Check that every frame has exactly one outcome."""
        assert self.whole | set(self.dropped) == set(self.sent)
        assert not self.whole & set(self.dropped)


class Drive:
    """A core with its runner, its client and its clock."""

    def __init__(self, **terms: object) -> None:
        self.terms = SessionSettings(**terms)  # type: ignore[arg-type]  # each test's own fields
        self.runner = ManualRunner()
        self.core: SessionCore[Frame] = SessionCore(self.terms, self.runner)
        self.ledger = Ledger(self.terms)
        self.now = 100.0
        self.sequence = 0

    def send(self, *task_ids: str, age: float = 0.0, must_run: bool = False) -> int:
        """Send a frame; return its sequence number."""
        self.sequence += 1
        frame = Frame(
            sequence=self.sequence,
            task_ids=task_ids or ("t",),
            captured_at=self.now - age,
            must_run=must_run,
        )
        self.ledger.sent[frame.sequence] = frame
        self.core.receive(frame, self.now)
        return frame.sequence

    def end(self, sequence: int, *indices: int) -> None:
        """End tasks of a running frame, by default all."""
        frame = next(each for each in self.runner.running if each.sequence == sequence)
        for index in indices or range(len(frame.task_ids)):
            self.core.ended(frame, index, OUTCOME)
        if len(frame.ended) == len(frame.task_ids) and frame in self.runner.running:
            self.runner.running.remove(frame)

    def read(self) -> list[object]:
        """Read all messages that are due."""
        messages: list[object] = []
        while (message := self.core.next(self.now)) is not None:
            self.ledger.check(message, self.now)
            messages.append(message)
        return messages

    def running(self) -> list[int]:
        """The running frames."""
        return [frame.sequence for frame in self.runner.running]

    def finish(self) -> None:
        """Half-close, end all frames, and read everything."""
        self.core.half_close()
        while True:
            self.read()
            if not self.runner.running:
                break
            self.end(self.runner.running[0].sequence)
        assert self.core.is_finished
        assert self.core.next_wake() == math.inf
        self.ledger.close()


# ---------------------------------------------------------------- rules


def words(*texts):
    """Return text in pieces, as one output."""
    return OutputDelta(
        request_id=RequestKey("r"), events=tuple(TextEvent(text=text) for text in texts)
    )


def of(kind, messages):
    """Return the messages of one type."""
    return [message for message in messages if isinstance(message, kind)]


def dropped(messages):
    """Return the sequences and reasons of the drops."""
    return [(each.sequence, each.reason) for each in of(Dropped, messages)]


def test_latest_wins():
    """The newest frame replaces the waiting one; the running one finishes."""
    drive = Drive()
    one, two, three = drive.send(), drive.send(), drive.send()
    assert drive.running() == [one]
    assert dropped(drive.read()) == [(two, DropReason.SUPERSEDED)]
    drive.end(one)
    assert drive.running() == [three]
    drive.finish()


def test_every_frame():
    """Frames queue up to the credits, in order; the next one is dropped."""
    drive = Drive(policy=FramePolicy.EVERY_FRAME, frame_credits=2)
    one, two, three, four = (drive.send() for _ in range(4))
    assert dropped(drive.read()) == [(four, DropReason.OVERLOADED)]
    drive.end(one)
    assert drive.running() == [two]
    drive.end(two)
    assert drive.running() == [three]
    drive.finish()


def test_preempt():
    """A newer frame stops the running one, and starts after its partial results."""
    drive = Drive(policy=FramePolicy.PREEMPT)
    one, two = drive.send("a", "b"), drive.send()
    assert drive.runner.stopped == [(one, 0), (one, 1)]
    assert drive.running() == [one]
    drive.end(one)
    results = of(FrameOutcome, drive.read())
    assert [each.stopped for each in results] == [DropReason.SUPERSEDED] * 2
    assert drive.running() == [two]
    drive.finish()


def test_a_frame_that_is_too_old_preempts_nothing():
    """A frame that is dropped on arrival leaves running ones alone."""
    drive = Drive(policy=FramePolicy.PREEMPT, max_frame_age=1.0)
    drive.send()
    drive.send(age=2.0)
    assert not drive.runner.stopped
    drive.finish()


@pytest.mark.parametrize("policy", FramePolicy)
def test_must_run(policy):
    """Such a frame is not superseded, not too old, and not stopped for a newer one."""
    drive = Drive(policy=policy, max_frame_age=1.0)
    pinned = [drive.send(must_run=True), drive.send(must_run=True, age=5.0)]
    drive.send()
    drive.send()
    drive.now += 10.0
    drive.read()
    assert not drive.runner.stopped
    assert not set(pinned) & set(drive.ledger.dropped)
    drive.finish()


def test_must_run_displaces_a_droppable_frame():
    """It displaces a droppable frame of a full queue."""
    drive = Drive(policy=FramePolicy.EVERY_FRAME, frame_credits=2)
    _, _, free, pinned = drive.send(), drive.send(), drive.send(), drive.send(must_run=True)
    assert dropped(drive.read()) == [(free, DropReason.OVERLOADED)]
    assert pinned not in drive.ledger.dropped
    drive.finish()


@pytest.mark.parametrize("stage", ["arriving", "waiting", "running", "in the ring"])
def test_a_frame_that_is_too_old_is_dropped_wherever_it_is(stage):
    """It gets TOO_OLD instead of a late result; its running tasks are aborted."""
    drive = Drive(max_frame_age=1.0, response_credits=1)
    if stage == "waiting":
        drive.send(must_run=True)
    if stage == "in the ring":
        drive.end(drive.send())
        drive.read()
    sequence = drive.send(age=1.5 if stage == "arriving" else 0.5)
    if stage == "in the ring":
        drive.end(sequence)
    assert drive.core.next_wake() <= drive.now + 0.5 or stage == "arriving"
    drive.now += 0.6
    assert dropped(drive.read()) == [(sequence, DropReason.TOO_OLD)]
    assert sequence not in drive.running()
    drive.finish()


def test_a_frame_with_a_result_sent_is_not_dropped():
    """A frame is not dropped for its age once one of its results was sent."""
    drive = Drive(max_frame_age=1.0)
    sequence = drive.send("a", "b")
    drive.end(sequence, 0)
    assert [each.last for each in of(FrameOutcome, drive.read())] == [False]
    drive.now += 5.0
    drive.end(sequence, 1)
    assert [each.last for each in of(FrameOutcome, drive.read())] == [True]
    drive.finish()


def test_cancel_by_sequence():
    """A waiting frame is dropped, a running one stopped; ended and unknown ones are left alone."""
    drive = Drive()
    one, two = drive.send("a", "b"), drive.send()
    drive.end(one, 0)
    for sequence in (one, two, two, 99):
        drive.core.cancel(sequence)
        drive.core.cancel(sequence)
    assert drive.runner.stopped == [(one, 1)]
    messages = drive.read()
    assert dropped(messages) == [(two, DropReason.CANCELLED)]
    drive.end(one, 1)
    assert [each.stopped for each in of(FrameOutcome, messages + drive.read())] == [
        None,
        DropReason.CANCELLED,
    ]
    drive.finish()


def test_cancel_by_task():
    """All running tasks of the id are stopped, no others, and no waiting ones."""
    drive = Drive(max_in_flight=2)
    one, two, _ = drive.send("a", "b"), drive.send("b", ""), drive.send("b")
    drive.core.cancel_task("b")
    drive.core.cancel_task("")
    drive.core.cancel_task("never")
    assert drive.runner.stopped == [(one, 1), (two, 0)]
    drive.finish()


def test_sequences_grow():
    """A sequence number that does not increase is an error, by its field."""
    drive = Drive()
    drive.send()
    drive.sequence -= 1
    with pytest.raises(SessionOutOfOrder) as caught:
        drive.send()
    assert caught.value.metadata["field"] == "frame.stamp.sequence"


def test_accepted_has_the_credits():
    """It is sent once, before any result; after go_away there are no credits left."""
    drive = Drive(frame_credits=5)
    drive.send()
    frame = drive.runner.running[0]
    drive.core.image_ready(frame)
    drive.core.image_ready(frame)
    assert drive.read() == [Accepted(1, 5)]
    drive.core.go_away(2.0)
    drive.send()
    assert drive.read() == [GoAwayNotice(2.0), Dropped(2, DropReason.GOING_AWAY, 0, 1)]
    drive.finish()


def test_no_credits_no_results():
    """Results wait for credits; each takes one."""
    drive = Drive(response_credits=1)
    for _ in range(3):
        drive.end(drive.send())
    assert len(drive.read()) == 1
    drive.core.grant(1)
    assert len(drive.read()) == 1
    drive.finish()


def test_the_oldest_unsent_frame_is_dropped_as_a_whole():
    """A frame whose results are lost is dropped OVERLOADED, and its running tasks are aborted."""
    drive = Drive(response_credits=1, max_unsent_frames=2, max_in_flight=4)
    drive.end(drive.send())
    drive.read()
    half = drive.send("a", "b", "c")
    drive.end(half, 0, 1)
    later = [drive.send(), drive.send()]
    for sequence in later:
        drive.end(sequence)
    assert dropped(drive.read()) == [(half, DropReason.OVERLOADED)]
    assert half not in drive.running()
    drive.core.grant(2)
    assert [each.frame.sequence for each in of(FrameOutcome, drive.read())] == later
    drive.finish()


def test_unsent_frames_that_must_run_are_kept():
    """Frames that must run, or with a result sent, are kept; new frames wait instead."""
    drive = Drive(response_credits=1, max_unsent_frames=1)
    half = drive.send("a", "b")
    drive.end(half)
    assert len(of(FrameOutcome, drive.read())) == 1
    drive.send()
    assert not drive.running()
    drive.core.grant(9)
    drive.read()
    assert drive.running()
    drive.finish()


def test_a_client_without_credits_is_disconnected():
    """The timeout counts from each grant, and only while a message waits."""
    drive = Drive(response_credits=1, credit_timeout=30.0)
    drive.end(drive.send())
    drive.read()
    drive.now += 100.0
    drive.read()
    drive.end(drive.send())
    drive.read()
    assert drive.core.next_wake() == drive.now + 30.0
    drive.now += 29.0
    drive.core.grant(1)
    drive.read()
    drive.end(drive.send())
    drive.read()
    drive.now += 29.0
    drive.read()
    drive.now += 1.0
    with pytest.raises(ClientTooSlow):
        drive.read()


def test_half_close_needs_no_credits():
    """The client cannot grant any more, so everything is sent."""
    drive = Drive(response_credits=1)
    for _ in range(3):
        drive.end(drive.send())
    drive.core.half_close()
    assert len(of(FrameOutcome, drive.read())) == 3
    assert drive.core.is_finished


def test_deltas_are_merged_while_they_wait():
    """Adjacent text is merged into one event; an object is an event of its own."""
    drive = Drive()
    drive.send()
    (frame,) = drive.runner.running
    thing = ObjectEvent(box=BOX, label="cup")
    for output in (
        QueuePosition(request_id=RequestKey("r"), position=1, estimated_wait=0.0),
        QueuePosition(request_id=RequestKey("r"), position=0, estimated_wait=0.0),
        words("a", "b"),
        words("c"),
        OutputDelta(request_id=RequestKey("r"), events=(thing, thing)),
    ):
        drive.core.output(frame, 0, output)
    queued, text, *things = [each.output for each in of(FrameOutput, drive.read())]
    assert queued.position == 0
    assert text.events == (TextEvent(text="abc"),)
    assert [each.events for each in things] == [(thing,), (thing,)]
    drive.finish()


def test_a_result_without_credits_for_its_deltas_is_sent_alone():
    """Events that the credits do not cover are left out, because the result repeats them."""
    drive = Drive(response_credits=1)
    drive.send()
    (frame,) = drive.runner.running
    drive.core.output(frame, 0, words("a"))
    drive.end(1)
    assert len(of(FrameOutcome, drive.read())) == 1
    drive.finish()
    drive = Drive(response_credits=2)
    drive.send()
    (frame,) = drive.runner.running
    drive.core.output(frame, 0, words("a"))
    drive.end(1)
    assert [type(each) for each in drive.read()] == [FrameOutput, FrameOutcome]
    drive.finish()


def test_stop_all_and_end_all():
    """Waiting frames are dropped, running ones stopped; tasks that do not end get empty results."""
    drive = Drive()
    one, two = drive.send("a", "b"), drive.send(must_run=True)
    drive.core.go_away(1.0)
    drive.core.stop_all()
    drive.end(one, 0)
    drive.core.end_all()
    messages = drive.read()
    assert dropped(messages) == [(two, DropReason.GOING_AWAY)]
    assert [each.outcome is None for each in of(FrameOutcome, messages)] == [False, True]
    assert drive.core.is_settled
    assert not drive.running()


def test_unread_notices_are_limited():
    """The session ends at a limit of unread notices."""
    drive = Drive(max_frame_age=1.0)
    for _ in range(MAX_UNREAD):
        drive.send(age=2.0)
    with pytest.raises(ClientTooSlow):
        drive.send(age=2.0)


@pytest.mark.parametrize(
    ("captured", "ages"),
    [
        ([99.9, 99.5, 100.0], [0.1, 0.5, 0.0]),  # one clock for both
        ([149.9, 149.5], [0.0, 0.4]),  # the caller's is ahead
        ([5.0, 4.5, 5.1], [0.0, 0.5, 0.0]),  # it counts from something else
        ([97.0, 99.9, 97.0], [0.0, 0.1, 3.0]),  # late at first, then seen to be trustworthy
        ([99.9, 90.0, 90.1, 90.2, 90.4], [0.1, 10.0, 9.9, 0.0, 0.0]),  # it was set back
        ([99.9, 98.0, 99.91, 98.0, 99.92, 98.0], [0.1, 2.0, 0.09, 2.0, 0.08, 2.0]),  # two cameras
        ([99.0, 99.5, 99.2, 99.3, 99.4], [0.0, 0.5, 0.8, 0.7, 0.6]),  # by less than the limit
    ],
)
def test_ages_on_a_foreign_clock(captured, ages):
    """A plausible delay is believed; otherwise the least delay counts as none."""
    clock = CaptureClock(1.0)
    assert [clock.age(each, 100.0) for each in captured] == pytest.approx(ages)


def test_without_a_frame_age_nothing_is_due():
    """An idle session without a greatest frame age waits for nothing."""
    assert Drive().core.next_wake() == math.inf


# ---------------------------------------------------------------- random walks
# Random sessions: both sides are counted in every order of events.

SELDOM = st.sampled_from([*[False] * 19, True])  # else most walks are over at once
IDS = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3)
MUST_RUN_ENDS = {DropReason.OVERLOADED, DropReason.CANCELLED, DropReason.GOING_AWAY}


class Session(RuleBasedStateMachine):
    """One session under a hypothesis state machine."""

    @initialize(
        policy=st.sampled_from(FramePolicy),
        max_in_flight=st.integers(1, 3),
        frame_credits=st.integers(2, 4),
        max_frame_age=st.sampled_from([0.5, float("inf")]),
        response_credits=st.sampled_from([None, 1, 4]),
        max_unsent_frames=st.integers(1, 3),
    )
    def open(self, **terms):
        """Open with any settings."""
        self.drive = Drive(**terms, credit_timeout=3.0)
        self.granted = terms["response_credits"]
        self.is_over = self.is_going = self.is_closed = False

    @precondition(lambda self: not self.is_closed)
    @rule(ids=IDS, age=st.sampled_from([0.0, 0.0, 0.3, 0.6]), must_run=st.booleans())
    def send(self, ids, age, must_run):
        """Send a frame."""
        self.drive.send(*ids, age=age, must_run=must_run)

    @rule(data=st.data())
    def end(self, data):
        """End some task, stopped ones mostly first."""
        for frame in self.drive.runner.running[:1] or []:
            left = [index for index in range(len(frame.task_ids)) if index not in frame.ended]
            self.drive.end(frame.sequence, data.draw(st.sampled_from(left)))

    @rule(data=st.data())
    def output(self, data):
        """Output a word of some task, after its image was read."""
        if self.drive.runner.running:
            frame = data.draw(st.sampled_from(self.drive.runner.running))
            self.drive.core.image_ready(frame)
            word = OutputDelta(request_id=RequestKey("r"), events=(TextEvent(text="word "),))
            self.drive.core.output(frame, len(frame.task_ids) - 1, word)

    @precondition(lambda self: not self.is_closed)
    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        """Cancel a frame, known or not."""
        self.drive.core.cancel(self.drive.sequence - back)

    @precondition(lambda self: not self.is_closed)
    @rule(task_id=st.sampled_from(["a", "", "never"]))
    def cancel_task(self, task_id):
        """Cancel a task, known or not."""
        self.drive.core.cancel_task(task_id)

    @precondition(lambda self: not self.is_closed)
    @rule(count=st.integers(1, 4))
    def grant(self, count):
        """Grant credits."""
        self.drive.core.grant(count)
        if self.granted is not None:
            self.granted += count

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.4]))
    def wait(self, seconds):
        """Let time pass."""
        self.drive.now += seconds

    @precondition(lambda self: not self.is_over)
    @rule()
    def read(self):
        """Read the messages that are due."""
        try:
            self.drive.read()
        except ClientTooSlow:
            assert self.granted is not None
            self.is_over = True

    @rule(now=SELDOM)
    def half_close(self, now):
        """Half-close."""
        if not now:
            return
        self.is_closed = True
        self.granted = None
        self.drive.core.half_close()

    @rule(now=SELDOM)
    def go_away(self, now):
        """Refuse new frames."""
        if not now:
            return
        self.is_going = True
        self.drive.core.go_away(1.0)

    @precondition(lambda self: self.is_going)
    @rule()
    def stop_all(self):
        """Stop all frames."""
        self.drive.core.stop_all()

    @invariant()
    def bounds_hold(self):
        """Neither running frames nor sent messages exceed their limits."""
        if not hasattr(self, "drive"):
            return
        assert len(self.drive.runner.running) <= self.drive.terms.max_in_flight
        if self.granted is not None:
            assert self.drive.ledger.spent <= self.granted
        for sequence, reason in self.drive.ledger.dropped.items():
            if self.drive.ledger.sent[sequence].must_run:
                assert reason in MUST_RUN_ENDS

    def teardown(self):
        """At the end, after a finish or an abort, every frame has its outcome."""
        if not hasattr(self, "drive") or self.is_over:
            return
        if self.is_going:
            self.drive.core.end_all()
            assert not self.drive.runner.running
        self.drive.finish()


TestSession = Session.TestCase
TestSession.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# ---------------------------------------------------------------- overload

SERVICE = 0.05  # seconds a frame takes
FRAMES = 700


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


SENT = 80  # frames


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
    for sequence in range(1, SENT + 1):
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
        assert len(client.whole) + len(client.dropped) == len(client.sent) == SENT
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
