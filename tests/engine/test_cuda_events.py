"""Events of a GPU without one: what they tell the clock that dates them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from legato_engine.device import cuda

pytest.importorskip("cuda.bindings")


DRIFT = 1e-3  # so that a short test has some


class TimingEvent:
    """Passes when it is recorded, by a clock that is slow."""

    def record(self, stream: object) -> None:
        """Take the time."""
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: TimingEvent) -> float:
        return (other.at - self.at) * (1 - DRIFT) / 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> cuda.CudaClock:
    """One second passes in 20 ms."""
    monkeypatch.setattr(cuda, "timing_event", TimingEvent)
    monkeypatch.setattr("legato_engine.device.base._PERIOD_NS", 20_000_000)
    stream: Any = None
    return cuda.CudaClock(stream)


def test_an_event_is_dated_between_its_record_and_its_sight(clock: cuda.CudaClock) -> None:
    """In launches of two events, for which the host waits or looks; also when it is used again."""
    stream: Any = None
    begun, ended = cuda.CudaEvent(clock), cuda.CudaEvent(clock)
    anchors = set()
    for index in range(60):
        before = time.perf_counter_ns()
        begun.record(stream)
        time.sleep(0.001)
        ended.record(stream)
        if index % 2:
            ended.wait()
        else:
            assert ended.query()
        after = time.perf_counter_ns()
        assert before <= begun.time_ns() <= after
        assert before <= ended.time_ns() <= after + 1_000_000 * DRIFT
        assert 1_000_000 * (1 - DRIFT) <= ended.time_ns() - begun.time_ns() <= after - before
        anchors.add(id(clock.anchor))
    assert len(anchors) > 1


def test_an_event_that_is_the_anchor_is_not_recorded_again(clock: cuda.CudaClock) -> None:
    """Another one takes its place."""
    stream: Any = None
    event = cuda.CudaEvent(clock)
    time.sleep(0.03)
    event.record(stream)
    event.wait()
    first = event.time_ns()
    assert event.event is not clock.anchor
    assert event.time_ns() == first
    event.record(stream)
    event.wait()
    assert event.time_ns() > first
