"""The stages of a single call."""

import pytest
from legato_engine.telemetry import LANES

from benchmarks.serve.lone import STAGES, Call, split


def span(lane, start, end):
    """A complete event of a timeline, in microseconds."""
    return {"tid": LANES.index(lane), "ts": start, "dur": end - start}


SPANS = [
    span("device compute", 10, 900),  # of the call before
    span("cpu plan", 5000, 5100),
    span("cpu launch", 5100, 7000),
    span("device compute", 5200, 20_000),
    span("device compute", 20_000, 20_010),
    span("device compute", 20_010, 21_000),
    span("device copy", 21_000, 21_500),
    span("device compute", 30_000, 31_000),  # of the next
]


def test_stages_follow_each_other_without_a_gap():
    """The stages add up to the whole call, each part by its own clock."""
    stages = split(Call(start=1000.0, end=22_000.0, picture=3000.0), SPANS)
    expected = {
        "there": 1.0,
        "picture": 3.0,
        "launch": 0.2,
        "prefill": 14.8,
        "decode": 1.0,
        "back": 1.0,
    }
    assert stages == pytest.approx(expected)
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx(21.0)


def test_a_call_that_the_timeline_has_forgotten():
    """A call without a launch in the timeline has no stages."""
    with pytest.raises(ValueError, match="holds no launch"):
        split(Call(start=40_000.0, end=50_000.0, picture=1.0), SPANS)
