"""Polling of a loop's outputs."""

from __future__ import annotations

import itertools

import pytest
from legato_engine.runtime import loops
from legato_engine.runtime.loops import PollTimer


class Clock:
    """Stands in for `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loops, "time", clock)
    return clock


def first_pauses(timer: PollTimer) -> tuple[float, float, float]:
    first, second, third = itertools.islice(timer.pauses(), 3)
    return first, second, third


def test_most_of_a_step_passes_without_a_look(clock: Clock) -> None:
    """As long as the step before took; after that polls are frequent."""
    timer = PollTimer()
    for _ in range(2):
        timer.found()
        clock.now += 0.002
    clock.now -= 0.001
    first, second, third = first_pauses(timer)
    assert 0.0002 < first < 0.001
    assert second == third < 1e-4
    clock.now += 0.0008
    assert first_pauses(timer) == (second, second, second)


def test_the_wait_for_a_first_step_is_no_length_of_a_step(clock: Clock) -> None:
    """It may hold a prefill in front; the host would sleep through the steps after it."""
    timer = PollTimer()
    timer.found()
    clock.now += 1.0
    timer.found()
    timer.begin()
    clock.now += 1.0
    timer.found()
    first, second, _ = first_pauses(timer)
    assert first == second
