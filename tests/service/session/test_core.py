"""The rules of a session, one by one, without a network and without a clock."""

import math

import pytest
from legato_engine.core import ObjectEvent, RequestKey, TextDelta
from legato_engine.errors import ClientTooSlow, SessionProtocol
from legato_engine.ipc.messages import Delta, Queued
from legato_service.session.capture_clock import CaptureClock
from legato_service.session.core import MAX_UNREAD
from legato_service.session.frame import Accepted, Dropped, Event, GoAway, Result
from legato_service.session.terms import Cause, Policy

from tests.service.fakes import BOX
from tests.service.session.drive import Drive


def words(*texts):
    """Text in pieces, as one report."""
    return Delta(request_id=RequestKey("r"), events=tuple(TextDelta(text=text) for text in texts))


def of(kind, messages):
    """The messages of one kind."""
    return [message for message in messages if isinstance(message, kind)]


def dropped(messages):
    """Sequences and causes of the drops."""
    return [(each.sequence, each.cause) for each in of(Dropped, messages)]


def test_latest_wins():
    """The waiting frame gives way to the newest, the running one finishes."""
    drive = Drive()
    one, two, three = drive.send(), drive.send(), drive.send()
    assert drive.running() == [one]
    assert dropped(drive.read()) == [(two, Cause.SUPERSEDED)]
    drive.end(one)
    assert drive.running() == [three]
    drive.finish()


def test_every_frame():
    """Frames queue up to the credits, in order; the one beyond them is dropped."""
    drive = Drive(policy=Policy.EVERY_FRAME, frame_credits=2)
    one, two, three, four = (drive.send() for _ in range(4))
    assert dropped(drive.read()) == [(four, Cause.OVERLOADED)]
    drive.end(one)
    assert drive.running() == [two]
    drive.end(two)
    assert drive.running() == [three]
    drive.finish()


def test_preempt():
    """A newer frame stops what runs; it starts once the older one has said what it has."""
    drive = Drive(policy=Policy.PREEMPT)
    one, two = drive.send("a", "b"), drive.send()
    assert drive.workers.stopped == [(one, 0), (one, 1)]
    assert drive.running() == [one]
    drive.end(one)
    results = of(Result, drive.read())
    assert [each.stopped for each in results] == [Cause.SUPERSEDED] * 2
    assert drive.running() == [two]
    drive.finish()


def test_a_frame_that_is_too_old_preempts_nothing():
    """A frame that is dropped on arrival leaves what runs alone."""
    drive = Drive(policy=Policy.PREEMPT, max_frame_age=1.0)
    drive.send()
    drive.send(age=2.0)
    assert not drive.workers.stopped
    drive.finish()


@pytest.mark.parametrize("policy", Policy)
def test_must_run(policy):
    """Such a frame is neither superseded nor too old nor stopped for a newer one."""
    drive = Drive(policy=policy, max_frame_age=1.0)
    pinned = [drive.send(must_run=True), drive.send(must_run=True, age=5.0)]
    drive.send()
    drive.send()
    drive.now += 10.0
    drive.read()
    assert not drive.workers.stopped
    assert not set(pinned) & set(drive.ledger.dropped)
    drive.finish()


def test_must_run_displaces_a_frame_that_need_not():
    """A full queue makes room for it, as long as there is one that can go."""
    drive = Drive(policy=Policy.EVERY_FRAME, frame_credits=2)
    _, _, free, pinned = drive.send(), drive.send(), drive.send(), drive.send(must_run=True)
    assert dropped(drive.read()) == [(free, Cause.OVERLOADED)]
    assert pinned not in drive.ledger.dropped
    drive.finish()


@pytest.mark.parametrize("stage", ["arriving", "waiting", "running", "in the ring"])
def test_a_frame_that_is_too_old_is_dropped_wherever_it_is(stage):
    """TOO_OLD instead of a late answer; what runs of it is aborted, what is ready is not told."""
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
    assert dropped(drive.read()) == [(sequence, Cause.TOO_OLD)]
    assert sequence not in drive.running()
    drive.finish()


def test_a_frame_with_a_result_told_is_finished():
    """One outcome: once a result is out, age drops the frame no more."""
    drive = Drive(max_frame_age=1.0)
    sequence = drive.send("a", "b")
    drive.end(sequence, 0)
    assert [each.last for each in of(Result, drive.read())] == [False]
    drive.now += 5.0
    drive.end(sequence, 1)
    assert [each.last for each in of(Result, drive.read())] == [True]
    drive.finish()


def test_cancel_by_sequence():
    """A waiting frame is dropped, a running one stopped; what ended or never was is left alone."""
    drive = Drive()
    one, two = drive.send("a", "b"), drive.send()
    drive.end(one, 0)
    for sequence in (one, two, two, 99):
        drive.core.cancel(sequence)
        drive.core.cancel(sequence)
    assert drive.workers.stopped == [(one, 1)]
    messages = drive.read()
    assert dropped(messages) == [(two, Cause.CANCELLED)]
    drive.end(one, 1)
    assert [each.stopped for each in of(Result, messages + drive.read())] == [None, Cause.CANCELLED]
    drive.finish()


def test_cancel_by_task():
    """All running tasks of the id are stopped, no others, and no waiting ones."""
    drive = Drive(max_in_flight=2)
    one, two, _ = drive.send("a", "b"), drive.send("b", ""), drive.send("b")
    drive.core.cancel_task("b")
    drive.core.cancel_task("")
    drive.core.cancel_task("never")
    assert drive.workers.stopped == [(one, 1), (two, 0)]
    drive.finish()


def test_sequences_grow():
    """A sequence that does not is a breach, named by its field."""
    drive = Drive()
    drive.send()
    drive.sequence -= 1
    with pytest.raises(SessionProtocol) as caught:
        drive.send()
    assert caught.value.metadata["field"] == "frame.stamp.sequence"


def test_accepted_tells_the_credits():
    """Once, before any result; after go-away there are none left."""
    drive = Drive(frame_credits=5)
    drive.send()
    frame = drive.workers.running[0]
    drive.core.taken(frame)
    drive.core.taken(frame)
    assert drive.read() == [Accepted(1, 5)]
    drive.core.go_away(2.0)
    drive.send()
    assert drive.read() == [GoAway(2.0), Dropped(2, Cause.GOING_AWAY, 0, 1)]
    drive.finish()


def test_no_credits_no_answers():
    """Results wait for a grant; each takes one."""
    drive = Drive(response_credits=1)
    for _ in range(3):
        drive.end(drive.send())
    assert len(drive.read()) == 1
    drive.core.grant(1)
    assert len(drive.read()) == 1
    drive.finish()


def test_the_ring_loses_its_oldest_frame_as_a_whole():
    """A frame whose results are lost is dropped OVERLOADED, its running tasks are aborted."""
    drive = Drive(response_credits=1, ring=2, max_in_flight=4)
    drive.end(drive.send())
    drive.read()
    half = drive.send("a", "b", "c")
    drive.end(half, 0, 1)
    later = [drive.send(), drive.send()]
    for sequence in later:
        drive.end(sequence)
    assert dropped(drive.read()) == [(half, Cause.OVERLOADED)]
    assert half not in drive.running()
    drive.core.grant(2)
    assert [each.frame.sequence for each in of(Result, drive.read())] == later
    drive.finish()


def test_the_ring_keeps_what_it_must():
    """Frames that must run, or have a result told, are not lost; new ones wait for room instead."""
    drive = Drive(response_credits=1, ring=1)
    half = drive.send("a", "b")
    drive.end(half)
    assert len(of(Result, drive.read())) == 1
    drive.send()
    assert not drive.running()
    drive.core.grant(9)
    drive.read()
    assert drive.running()
    drive.finish()


def test_a_client_without_credits_is_given_up():
    """After the patience, counted anew from each grant, and only while something waits."""
    drive = Drive(response_credits=1, patience=30.0)
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
    """Nobody can grant any more, so everything is told."""
    drive = Drive(response_credits=1)
    for _ in range(3):
        drive.end(drive.send())
    drive.core.half_close()
    assert len(of(Result, drive.read())) == 3
    assert drive.core.is_finished


def test_deltas_are_joined_while_they_wait():
    """Neighbouring pieces of text are one event; an object is one by itself."""
    drive = Drive()
    drive.send()
    (frame,) = drive.workers.running
    thing = ObjectEvent(box=BOX, label="cup")
    for report in (
        Queued(request_id=RequestKey("r"), position=1, estimated_wait=0.0),
        Queued(request_id=RequestKey("r"), position=0, estimated_wait=0.0),
        words("a", "b"),
        words("c"),
        Delta(request_id=RequestKey("r"), events=(thing, thing)),
    ):
        drive.core.report(frame, 0, report)
    queued, text, *things = [each.report for each in of(Event, drive.read())]
    assert queued.position == 0
    assert text.events == (TextDelta(text="abc"),)
    assert [each.events for each in things] == [(thing,), (thing,)]
    drive.finish()


def test_a_result_without_room_for_its_deltas_goes_alone():
    """Events that the credits do not cover are left out: the result repeats them."""
    drive = Drive(response_credits=1)
    drive.send()
    (frame,) = drive.workers.running
    drive.core.report(frame, 0, words("a"))
    drive.end(1)
    assert len(of(Result, drive.read())) == 1
    drive.finish()
    drive = Drive(response_credits=2)
    drive.send()
    (frame,) = drive.workers.running
    drive.core.report(frame, 0, words("a"))
    drive.end(1)
    assert [type(each) for each in drive.read()] == [Event, Result]
    drive.finish()


def test_winding_up():
    """What waits is dropped, what runs is stopped, and what has not ended by the cut is empty."""
    drive = Drive()
    one, two = drive.send("a", "b"), drive.send(must_run=True)
    drive.core.go_away(1.0)
    drive.core.wind_up()
    drive.end(one, 0)
    drive.core.cut()
    messages = drive.read()
    assert dropped(messages) == [(two, Cause.GOING_AWAY)]
    assert [each.outcome is None for each in of(Result, messages)] == [False, True]
    assert drive.core.is_settled
    assert not drive.running()


def test_a_client_that_reads_nothing_cannot_pile_up_notices():
    """Beyond a bound of unread notices the session is given up."""
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
    ],
)
def test_ages_on_a_clock_that_is_not_ours(captured, ages):
    """A delay that can be one is believed; otherwise the quickest frame's counts as none."""
    clock = CaptureClock(1.0)
    assert [clock.age(each, 100.0) for each in captured] == pytest.approx(ages)


def test_without_a_bound_nothing_is_due():
    """An idle session without a greatest frame age waits for nothing."""
    assert Drive().core.next_wake() == math.inf
