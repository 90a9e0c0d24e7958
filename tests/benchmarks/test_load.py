"""Figures of calls."""

from __future__ import annotations

import pytest

from benchmarks.load import Call, summarise


def calls_of(callers: int, count: int, seconds: float) -> list[Call]:
    """Return `count` calls of every caller without a pause; the first and last do not count."""
    return [
        Call(turn * seconds, (turn + 1) * seconds, timed=0 < turn < count - 1, tokens=3)
        for turn in range(count)
        for _ in range(callers)
    ]


def test_requests_per_second_are_those_of_the_steady_state() -> None:
    """Callers that are never idle get callers / latency answers a second."""
    cell = summarise(calls_of(callers=8, count=12, seconds=0.5), load_cpu=0.25)
    assert cell.per_second == pytest.approx(16.0)
    assert (cell.p50, cell.p95, cell.p99) == pytest.approx((500.0, 500.0, 500.0))
    assert (cell.calls, cell.failed, cell.mean_tokens, cell.load_cpu) == (80, 0, 3.0, 0.25)
    assert cell.answered == 96


def test_failures_are_counted_and_have_no_latency() -> None:
    """A failed call is counted and named, timed or not, and moves no percentile."""
    good = calls_of(callers=2, count=10, seconds=1.0)
    broken = [Call(1.0, 90.0, timed=True, error="QueueFull: full"), Call(0, 1, False, error="x")]
    cell = summarise(good + broken, load_cpu=0.0)
    assert cell.failed == 2
    assert cell.p99 == pytest.approx(1000.0)
    assert cell.errors == ("QueueFull: full", "x")


def test_nothing_answered_gives_no_figures() -> None:
    """A cell without answers gives the number of failed calls and divides by nothing."""
    cell = summarise([Call(0, 1, True, error="x")] * 3, load_cpu=0.0)
    assert (cell.calls, cell.failed, cell.per_second) == (0, 3, 0)


def test_shares_are_of_the_timed_calls() -> None:
    """Shares of known images are of the timed calls."""
    calls = [Call(place, place + 1, place > 1, 3, hit=place % 2 == 0) for place in range(6)]
    assert summarise(calls, load_cpu=0.0).hit_share == pytest.approx(0.5)
