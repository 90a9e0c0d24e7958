"""Figures of a run of speculation: rates and their intervals."""

import random

import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble

from benchmarks.speculation.run import Run, interval
from benchmarks.speculation.workloads import (
    PROFILES,
    Profile,
    at_once,
    rates_of,
    synthetic_requests,
)


def test_an_interval_holds_the_rate_nearly_always():
    """A known rate is in the interval of about 95 % of its samples."""
    draw = random.Random(0)
    held = 0
    for _ in range(1000):
        low, high = interval(sum(draw.random() < 0.4 for _ in range(200)), 200)
        held += low < 0.4 < high
    assert 930 < held < 970


@pytest.mark.parametrize(("accepted", "tried"), [(0, 0), (0, 5), (5, 5), (2, 5)])
def test_an_interval_is_of_shares(accepted, tried):
    """An interval is within 0 and 1 and has the observed share; without trials it is all of it."""
    low, high = interval(accepted, tried)
    assert 0.0 <= low <= (accepted / tried if tried else 0.0) <= high <= 1.0
    assert tried or (low, high) == (0.0, 1.0)


@pytest.fixture(scope="module")
def assembly():
    """A tiny model for two streams."""
    config = EngineConfig(
        model="random-tiny", device="cpu", threads=1, random_weights=True, max_running=2
    )
    made = assemble(config)
    yield made
    made.device.close()


def test_waves_follow_each_other(assembly):
    """A wave is submitted after the end of the one before, so that all of it decodes together."""
    profile = PROFILES["structured"]
    requests = synthetic_requests(assembly, profile, length=12, fewest=5)
    assert len(requests) == 6
    run = Run(assembly, requests, at_once(assembly, profile))
    figures = run.figures("structured", 2, "off", run)
    assert figures.num_steps == 3 * 12  # of a step more than a task expects its end
    assert figures.num_tried == 0
    assert figures.decode_tokens_per_second > figures.tokens_per_second


def test_a_lone_rate_has_a_sample_of_it(assembly):
    """Profiles with a rate have five times the requests, because rates are in fifths."""
    for name, count in {"0.4": 10, "0.6": 10, "0.8": 10, "structured": 2}.items():
        requests = synthetic_requests(assembly, PROFILES[name], length=12, fewest=2)
        assert len(requests) == count


def test_a_course_is_in_parts_of_the_answer(assembly):
    """Each rate holds for an equal part of it, after the prompt."""
    profile = Profile(((0.9, 0.1), 0.5))
    one, other = synthetic_requests(assembly, profile, length=10, fewest=2)
    first, second = rates_of(profile, [one, other])
    assert not isinstance(first, float)
    answer = first[one.prompt_length :]
    assert set(answer[:6]) == {0.9}
    assert set(answer[6:]) == {0.1}
    assert len(answer) >= 10
    assert second == 0.5


def test_under_pressure_all_are_there_at_once(assembly):
    """Twice as many requests as streams are submitted at once."""
    profile = PROFILES["under pressure"]
    assert at_once(assembly, profile) == 4
    assert len(synthetic_requests(assembly, profile, length=12, fewest=5)) == 8
