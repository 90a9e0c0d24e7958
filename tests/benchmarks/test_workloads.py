"""The requests of the end-to-end benchmark."""

from __future__ import annotations

import collections

import pytest

from benchmarks.workloads import WORKLOADS, Ask, Job, cached, mix, new

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
