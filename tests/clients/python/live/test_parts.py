"""The parts of a feed: the mailbox, the delays, the clock of a source, the counts."""

from __future__ import annotations

import re
import threading

import pytest
from legato_client.stream.frames import (
    Backoff,
    CapturedFrame,
    FrameCounters,
    Mailbox,
    SourceClock,
    summary,
)

from tests.clients.python.until import until

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
