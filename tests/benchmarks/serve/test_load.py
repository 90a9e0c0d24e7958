"""Requests of callers, and figures of their calls."""

from __future__ import annotations

import collections

import pytest

from benchmarks.serve.load import WORKLOADS, Ask, Call, Job, cached, mix, new, summarise


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


ASK = Ask(callers=16, calls=300, tokens=3, first=1000)


def timed(jobs: list[Job]) -> list[Job]:
    """Return the calls that count."""
    return [job for job in jobs if job.timed]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("callers", [1, 4, 64])
def test_as_many_timed_calls_as_asked(name: str, callers: int) -> None:
    """A cell has exactly its calls, with untimed ones before and, for many callers, after."""
    ask = Ask(callers=callers, calls=50, tokens=30, first=7)
    jobs = WORKLOADS[name](ask)
    assert len(jobs) == ask.total
    assert len(timed(jobs)) == 50
    assert not any(job.timed for job in jobs[: ask.lead])
    assert jobs[-1].timed == (callers == 1)
    assert {job.tokens for job in jobs} == {30}


def test_new_never_repeats_an_image() -> None:
    """Every call of `new` has an image of its own."""
    assert len({job.image for job in new(ASK)}) == ASK.total


def test_cached_has_one_image() -> None:
    """Every call of `cached` has the same image."""
    assert {job.image for job in cached(ASK)} == {ASK.first}


def test_mix_asks_five_questions_for_every_three_images() -> None:
    """Two of five timed calls of `mix` are about an image of an earlier call."""
    jobs = mix(Ask(callers=16, calls=3000, tokens=3, first=1))
    seen: set[int] = set()
    repeats = 0
    for job in jobs:
        repeats += job.timed and job.image in seen
        seen.add(job.image)
    assert repeats / 3000 == pytest.approx(0.4, abs=0.02)
    assert max(collections.Counter(job.image for job in jobs).values()) == 2


def test_mix_repeats_when_the_first_answer_is_there() -> None:
    """A repeat comes neither while its image is still being answered nor long after."""
    last: dict[int, int] = {}
    distances = []
    for place, job in enumerate(mix(ASK)):
        if job.image in last:
            distances.append(place - last[job.image])
        last[job.image] = place
    assert min(distances) >= ASK.callers * 0.5
    assert max(distances) <= 4 * ASK.callers


def test_mix_is_the_same_for_the_same_cell() -> None:
    """A cell can be repeated call by call."""
    assert mix(ASK) == mix(ASK)
