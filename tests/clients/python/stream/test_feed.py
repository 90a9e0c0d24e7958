"""A feed before a server that follows a script, and its parts."""

from __future__ import annotations

import functools
import re
import threading
import time
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from legato.v1 import geometry_pb2, session_pb2, task_pb2
from legato_client import CaptionTask, Client, DetectTask, LegatoError, NotFound, Unavailable
from legato_client.stream.feed import AnsweredFrame, Feed, FeedSettings
from legato_client.stream.frames import (
    Backoff,
    CapturedFrame,
    FrameCounters,
    Mailbox,
    SourceClock,
    summary,
)

from tests.clients.python.face import until
from tests.clients.python.fake_server import Conversation, failure, ignore

GONE = failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")
TASKS = {"caption": CaptionTask(), "short": CaptionTask("short")}


def image() -> Any:
    return b"picture"


class Played:
    """A feed that runs in a thread of its own."""

    def __init__(self, client, **how):
        waits, patience = how.pop("waits", False), how.pop("patience", 30.0)
        self.answered: list[AnsweredFrame] = []
        self.counters = FrameCounters(how.get("max_age"))
        self.problem: Exception | None = None
        self._count = 0
        self.feed = Feed(
            client,
            FeedSettings(how.pop("tasks", TASKS), **how),
            how.get("tell", self.answered.append),
            self.counters,
            patience=patience,
            waits=waits,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self.feed.run()
        except (LegatoError, OSError) as error:
            self.problem = error

    def offer(self, read=image):
        self.feed.offer(CapturedFrame(self._count, 0.0, time.time_ns(), read, read, "camera"))
        self._count += 1

    @property
    def numbers(self):
        return [each.frame.number for each in self.answered]

    def join(self):
        self._thread.join()
        totals = self.counters.totals()
        waiting = totals.sent + totals.replaced + totals.refused + totals.unreadable
        assert totals.taken + totals.resent == waiting
        ended = totals.answered + sum(totals.dropped.values()) + totals.lost + totals.resent
        assert totals.sent == ended
        return totals


@pytest.fixture
def client(server):
    with Client(server.target) as connected:
        yield connected


@pytest.fixture
def play(client, server):
    """Start a feed; it is ended after the test."""
    started = []

    def start(**how):
        started.append(Played(client, **how))
        return started[-1]

    yield start
    for each in started:
        each.feed.stop()
        each.join()
    assert not [each.violations for each in server.sessions.conversations if each.violations]


def test_every_task_of_a_image_comes_at_once(play):
    """Under the names that were asked, with the frame's own stamp."""
    played = play()
    played.offer()
    until(lambda: played.answered)
    played.feed.finish()
    totals = played.join()
    (answered,) = played.answered
    assert list(answered.outcomes) == ["caption", "short"]
    assert answered.outcomes["short"].caption == "frame 1"
    assert answered.outcomes["short"].info.stamp.frame_id == "camera"
    assert (totals.answered, totals.failed_tasks, totals.reconnects) == (1, 0, 0)
    assert played.feed.model == "fake"


def test_a_server_that_goes_away_is_left_while_it_answers(play, server):
    """The next image opens another session; the first one's is answered by the first."""
    kept = []

    def hold(conversation: Conversation, frame: session_pb2.Frame) -> None:
        if len(server.sessions.conversations) == 1:
            kept.append(frame)
            conversation.accept(frame.stamp.sequence)
            conversation.say(
                "go_away", session_pb2.SessionGoAway(reason=status_pb2.Status(code=14))
            )
        else:
            conversation.answer(frame)

    def late(conversation: Conversation) -> None:
        if conversation is not server.sessions.conversations[0]:
            conversation.end()
            return
        for frame in kept:
            conversation.answer(frame)
        conversation.fail(GONE)

    server.sessions.on_frame = hold
    server.sessions.on_finish = late
    played = play()
    played.offer()
    until(lambda: len(server.sessions.conversations) == 2)
    played.offer()
    until(lambda: len(played.answered) == 2)
    played.feed.finish()
    totals = played.join()
    assert played.problem is None
    assert sorted(played.numbers) == [0, 1]
    assert (totals.lost, totals.reconnects) == (0, 1)


@pytest.mark.parametrize("every", [False, True])
def test_a_lost_session_is_followed_by_another(play, server, every):
    """Its image is lost, or sent again where every one counts."""

    def fail_first(conversation: Conversation, frame: session_pb2.Frame) -> None:
        if len(server.sessions.conversations) == 1:
            conversation.fail(GONE)
        else:
            conversation.answer(frame)

    server.sessions.on_frame = fail_first
    played = play(every=every)
    played.offer()
    until(lambda: len(server.sessions.conversations) == 2)
    played.offer()
    until(lambda: 1 in played.numbers)
    played.feed.finish()
    totals = played.join()
    assert played.problem is None
    assert played.numbers == ([0, 1] if every else [1])
    assert (totals.lost, totals.resent) == ((0, 1) if every else (1, 0))
    assert totals.reconnects == 1


def test_tracks_of_two_sessions_are_not_confused(play, server):
    """Detections are followed where that is asked; a session uses no name of an earlier one."""

    def end_first(conversation: Conversation, frame: session_pb2.Frame) -> None:
        detect = task_pb2.DetectResult(
            objects=[geometry_pb2.DetectedObject(track_id=name) for name in ("1", "")]
        )
        conversation.accept(frame.stamp.sequence)
        for task in conversation.tasks:
            last = task is conversation.tasks[-1]
            result = task_pb2.TaskResult(task_id=task.task_id, detect=detect)
            conversation.result(frame, result, last)
        if len(server.sessions.conversations) == 1:
            conversation.fail(GONE)

    server.sessions.on_frame = end_first
    tasks = {"a": DetectTask("cup"), "b": CaptionTask()}
    played = play(tasks=tasks, track=True)
    for number in (0, 1):
        played.offer()
        until(functools.partial(is_answered, played, number))
        until(lambda: len(server.sessions.conversations) == 2)
    names = [[each.track_id for each in a.outcomes["a"].objects] for a in played.answered]
    assert names == [["1", ""], ["2-1", ""]]
    opened = server.sessions.conversations[0].requests[0].open
    detection, caption = opened.standing_tasks
    assert detection.detect.HasField("tracking")
    assert (detection.task_id, caption.task_id) == ("a", "b")


def tracked(name: str, left: float) -> geometry_pb2.DetectedObject:
    """A cup that stands still, a tenth of the image wide."""
    box = geometry_pb2.Box(x_min=left, y_min=0.4, x_max=left + 0.1, y_max=0.5)
    at = geometry_pb2.BoxAxes(center_x=left + 0.05, center_y=0.45, width=0.1, height=0.1)
    motion = geometry_pb2.Motion(position=at)
    return geometry_pb2.DetectedObject(label="cup", track_id=name, box=box, motion=motion)


def test_a_track_outlives_its_session(play, server):
    """Lost tracks are predicted, and another session continues those whose objects are there."""
    sessions = [
        [tracked("1", 0.1), tracked("2", 0.3), tracked("3", 0.8)],
        [tracked("1", 0.32), tracked("2", 0.55), tracked("3", 0.12)],
        [tracked("1", 0.1), tracked("2", 0.55)],
    ]

    def answer(conversation: Conversation, frame: session_pb2.Frame) -> None:
        objects = sessions[len(server.sessions.conversations) - 1]
        conversation.accept(frame.stamp.sequence)
        detect = task_pb2.DetectResult(objects=objects)
        conversation.result(frame, task_pb2.TaskResult(task_id="a", detect=detect), True)
        conversation.fail(GONE)

    server.sessions.on_frame = answer
    played = play(tasks={"a": DetectTask("cup")}, track=True)
    expected = (["1", "2", "3"], ["2", "2-2", "1"], ["1", "2-2"])
    for number, names in enumerate(expected):
        played.offer()
        until(functools.partial(is_answered, played, number))
        assert [each.track_id for each in played.answered[-1].outcomes["a"].objects] == names
        seen = played.feed.now(played.answered[-1].frame.captured_ns)
        assert {"1", "2", "3"} <= {each.track_id for each in seen}
        until(lambda: len(server.sessions.conversations) == number + 2)  # noqa: B023 - runs here
    much_later = time.time_ns() + 60 * 10**9
    assert played.feed.now(much_later) == ()


def test_other_tasks_are_asked_in_the_same_session(play, server):
    """From the next image on; any other setting takes another session."""
    played = play()

    def ask(number):
        played.offer()
        until(functools.partial(is_answered, played, number))
        return list(played.answered[-1].outcomes), len(server.sessions.conversations)

    assert ask(0) == (["caption", "short"], 1)
    played.feed.change(FeedSettings({"long": CaptionTask("long")}))
    assert ask(1) == (["long"], 1)
    played.feed.change(FeedSettings(TASKS, name="other"))
    assert ask(2) == (["caption", "short"], 2)
    played.feed.finish()
    assert played.join().lost == 0


def test_a_lost_server_is_looked_for_again_and_again(play, server):
    """Each attempt that fails is followed by another, without an image."""
    played = play()
    until(lambda: played.feed.model)
    server.sessions.script.extend([GONE] * 4)
    server.sessions.last.fail(GONE)
    until(lambda: len(server.sessions.conversations) == 2)
    assert not server.sessions.script
    played.offer()
    until(lambda: played.answered)


def test_patience_with_a_lost_server_ends(play, server):
    """With the server's own error."""
    played = play(patience=0.5)
    until(lambda: played.feed.model)
    server.sessions.script.extend([GONE] * 100)
    server.sessions.last.fail(GONE)
    played.join()
    assert isinstance(played.problem, Unavailable)


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_server_is_waited_for_on_request(play, server, waits):
    """A command that is typed fails at once, a node waits for its server."""
    server.sessions.script.extend([GONE] * 4)
    played = play(waits=waits)
    if waits:
        played.offer()
        until(lambda: played.answered)
    else:
        played.join()
        assert isinstance(played.problem, Unavailable)


def test_what_another_session_would_meet_too_ends_it(play, server):
    """A model that is not served."""
    server.sessions.script.append(failure(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"))
    played = play(waits=True)
    played.join()
    assert isinstance(played.problem, NotFound)


def test_the_newest_of_many_is_sent(play, server):
    """Once there is a credit; until then older ones give way to it, and are counted."""
    server.sessions.on_frame = ignore
    played = play()
    until(lambda: played.offer() or played.counters.totals().sent == 2)
    for _ in range(20):
        played.offer()
    until(lambda: left_out(played) == len_of(played) - 3)
    server.sessions.on_frame = Conversation.answer
    for frame in server.sessions.last.frames:
        server.sessions.last.answer(frame)
    newest = len_of(played) - 1
    until(lambda: newest in played.numbers)
    played.feed.finish()
    assert played.join().answered == 3


def is_answered(played, number):
    return number in played.numbers


def len_of(played):
    return played.counters.totals().taken


def left_out(played):
    totals = played.counters.totals()
    return totals.replaced + totals.refused


def test_every_image_waits_for_room(play, server):
    """And each is answered, in order."""
    played = play(every=True)
    for _ in range(50):
        played.offer()
    played.feed.finish()
    assert played.join().answered == 50
    assert played.numbers == list(range(50))


def test_drops_are_counted_by_reason(play, server):
    """As the server says them."""

    def drop(conversation: Conversation, frame: session_pb2.Frame) -> None:
        conversation.drop(frame.stamp.sequence, session_pb2.DROP_REASON_TOO_OLD)

    server.sessions.on_frame = drop
    played = play()
    played.offer()
    until(lambda: played.counters.totals().dropped)
    played.feed.finish()
    assert played.join().dropped == {"too_old": 1}


def test_an_age_limit_that_no_answer_meets_is_measured(play, server, caplog):
    """One frame is finished however late; its results are not shown, and its time is reported."""
    too_old = session_pb2.DROP_REASON_TOO_OLD

    def drop(conversation: Conversation, frame: session_pb2.Frame) -> None:
        if frame.must_run:
            conversation.answer(frame)
        else:
            conversation.drop(frame.stamp.sequence, too_old)

    server.sessions.on_frame = drop
    played = play(max_age=0.5)
    for number in range(12):
        played.offer()
        until(lambda: sum(played.counters.totals().dropped.values()) == number + 1)  # noqa: B023
    played.feed.finish()
    totals = played.join()
    assert (totals.dropped, totals.answered) == ({"too_old": 12}, 0)
    assert [frame.must_run for frame in server.sessions.last.frames].count(True) == 1
    assert totals.age_limit_problem.startswith("12 of 12 frames too old: answers take 0.")
    (warning,) = [each for each in caplog.messages if "too old" in each]
    assert "the age limit is 0.5 s: raise max_frame_age" in warning


def test_a_image_that_cannot_be_read_is_passed_over(play, server):
    """The next one is asked about."""

    def broken():
        raise ValueError("no image")

    played = play(every=True)
    played.offer(broken)
    played.offer()
    played.feed.finish()
    assert played.join().unreadable == 1
    assert played.counters.problem == "no image"
    assert played.numbers == [1]


def test_stopping_gives_up_what_is_under_way(play, server):
    """It counts as lost."""
    server.sessions.on_frame = ignore
    played = play()
    played.offer()
    until(lambda: played.counters.totals().sent == 1)
    played.feed.stop()
    assert played.join().lost == 1
    assert played.problem is None


def test_a_receiver_that_fails_ends_it(client, server):
    """As a full disk does."""

    def full(answered):
        raise OSError(28, "No space left on device")

    counters = FrameCounters()
    feed = Feed(client, FeedSettings(TASKS), full, counters, patience=1, waits=False)
    feed.offer(CapturedFrame(0, 0.0, time.time_ns(), image, image))
    with pytest.raises(OSError, match="No space left"):
        feed.run()


# ---------------------------------------------------------------- parts of a feed

SECOND = 10**9


def frame(number: int = 0) -> CapturedFrame:
    def none():
        raise ValueError("no image")

    return CapturedFrame(number, 0.0, 1, none, none)


def never() -> bool:
    return False


def taken(mailbox: Mailbox) -> int | None:
    """The number of the image, None once the mailbox is done."""
    found = mailbox.take(never)
    return None if found is None else found.number


def delay_of(backoff: Backoff) -> float:
    delay = backoff.next_delay()
    assert delay is not None
    return delay


def test_the_newest_image_takes_the_place():
    """`put` says how many others there were."""
    mailbox = Mailbox(every=False)
    assert [mailbox.put(frame(n)) for n in range(3)] == [0, 1, 1]
    assert taken(mailbox) == 2
    mailbox.put(frame(3))
    mailbox.close()
    assert mailbox.put(frame(4)) == 1
    assert taken(mailbox) == 3
    assert taken(mailbox) is None


def test_a_mailbox_is_done_once_it_is_closed_and_empty():
    """What is held when it closes can still be taken."""
    mailbox = Mailbox(every=False)
    states = [mailbox.is_done]
    mailbox.put(frame(1))
    mailbox.close()
    states.append(mailbox.is_done)
    assert taken(mailbox) == 1
    states.append(mailbox.is_done)
    assert states == [False, False, True]


def test_every_image_waits_for_its_place():
    """Until the one before is taken; closing ends the wait."""
    mailbox = Mailbox(every=True)
    unsent: list[int] = []
    thread = threading.Thread(target=lambda: unsent.extend(mailbox.put(frame(n)) for n in range(3)))
    thread.start()
    assert [taken(mailbox) for _ in range(2)] == [0, 1]
    until(lambda: unsent == [0, 0, 0])
    thread.join()
    blocked = threading.Thread(target=lambda: unsent.append(mailbox.put(frame(9))))
    blocked.start()
    assert mailbox.discard() == 1
    blocked.join()
    assert unsent[-1] == 1


def test_a_thread_that_takes_gives_up_at_a_nudge():
    """And leaves the image where it is."""
    mailbox = Mailbox(every=False)
    given_up = threading.Event()
    found = []
    thread = threading.Thread(target=lambda: found.append(mailbox.take(given_up.is_set)))
    thread.start()
    mailbox.nudge()
    given_up.set()
    mailbox.nudge()
    thread.join()
    assert found == [None]
    mailbox.put(frame(5))
    assert mailbox.take(given_up.is_set) is None
    assert taken(mailbox) == 5


def test_delays_double_until_a_success():
    """Up to 5 s, a fifth more or less, and at least what the server asks for."""
    backoff = Backoff(None, lambda: 0.0)
    delays = [delay_of(backoff) for _ in range(9)]
    for delay, middle in zip(delays, [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5], strict=True):
        assert 0.8 * middle <= delay <= 1.2 * middle
    assert backoff.next_delay(at_least=60) == 60
    backoff.note_reached()
    assert delay_of(backoff) >= 4
    backoff.note_success()
    assert delay_of(backoff) <= 0.24


def test_delays_stay_short_while_a_peer_starts():
    """So that a restarted server is found soon, also after other failures."""
    backoff = Backoff(None, lambda: 0.0)
    for _ in range(9):
        delay_of(backoff)
    delays = [backoff.next_delay(is_starting=True) for _ in range(9)]
    assert all(delay is not None and delay <= 0.6 for delay in delays)


def test_patience_ends():
    """It counts from the first failure since something was reached."""
    now = 100.0
    backoff = Backoff(10.0, lambda: now)
    assert backoff.next_delay() is not None
    now = 109.0
    backoff.note_reached()
    assert backoff.next_delay() is not None
    now = 118.0
    assert backoff.next_delay() is not None
    now = 119.5
    assert backoff.next_delay() is None


def test_a_slow_image_is_old():
    """By what it took longer than the fastest."""
    clock = SourceClock()
    assert clock.captured_ns(0.0, 1000 * SECOND) == 1000 * SECOND
    assert clock.captured_ns(1.0, 1001 * SECOND + 5) == 1001 * SECOND
    assert clock.captured_ns(2.0, 1002 * SECOND - 7) == 1002 * SECOND - 7
    assert clock.captured_ns(3.0, 1004 * SECOND) == 1003 * SECOND - 7


@pytest.mark.parametrize("drift", [-1e-3, 1e-3])
def test_clocks_may_run_apart(drift):
    """A camera whose clock is a thousandth wrong: ages stay below what it errs in 20 s."""
    clock = SourceClock()
    for second in range(1000):
        arrived = 5000 * SECOND + second * SECOND
        captured = clock.captured_ns(second * (1 + drift), arrived)
        assert 0 <= arrived - captured <= 0.021 * SECOND


def test_every_image_is_in_the_summary():
    """With what became of it."""
    counters = FrameCounters()
    for name, number in (("taken", 9), ("sent", 6), ("replaced", 2), ("refused", 1), ("lost", 1)):
        counters.count(name, number)
    counters.count_dropped("too_old")
    for age in (0.1, 0.2, 0.3, 0.4):
        counters.count_answered(age, failed_tasks=1)
    totals = counters.totals()
    assert totals.answered == 4
    assert totals.dropped == {"too_old": 1}
    assert totals.age_p50 == pytest.approx(0.2, rel=0.02)
    lines = summary(totals)
    assert "9 frames" in lines[0]
    assert (
        "6 sent, 2 replaced by a newer one before sending, 1 not sent at the end of a session"
        in lines[0]
    )
    assert lines[1] == "4 answered, 1 dropped as too_old, 1 lost with a session, 4 tasks failed"
    assert re.search(r"p50 20\d ms, p95 40\d ms", lines[2])
