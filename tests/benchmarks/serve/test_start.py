"""What a start is measured by."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.serve import start


def test_each_model_starts_with_speculation_and_without():
    """A file is served in float32 and in 8 bits."""
    cases = start.cases_of(Path("a.gguf"))
    assert len(cases) == 6
    assert sum("budget" in options for options in cases.values()) == 3
    assert cases["a.gguf, int8"] == ("--weights", "a.gguf", "--weight-dtype", "int8")
    assert len(start.cases_of(None)) == 2


def test_a_stage_without_an_event_ends_as_it_begins():
    """A model's description may be read between two looks at the engine."""
    seen = {"start": 1.0, "weights": 5.0, "ready": 8.0}
    assert start.with_unseen(seen) == {
        "start": 1.0,
        "device": 5.0,
        "weights": 5.0,
        "warm-up": 8.0,
        "ready": 8.0,
    }


def test_the_table_has_medians():
    """One turn of three that was disturbed does not show."""
    turns = [
        start.Start(
            dict.fromkeys(start.STAGES, seconds),
            seconds,
            {"Rss": 3, "Pss": 2, "Uss": 1},
            {"Rss": 6, "Pss": 4, "Uss": 2},
        )
        for seconds in (1.0, 9.0, 2.0)
    ]
    row = start.table({"tiny": turns}).splitlines()[-1]
    assert row == "| tiny | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 | 3 | 1 | 4 |"


def test_memory_and_processor_time_are_those_of_the_process():
    """What is its own is part of what it shares, and that of what it holds."""
    held = start.memory_mib(os.getpid())
    assert 0 < held["Uss"] <= held["Pss"] <= held["Rss"]
    assert start.cpu_seconds(os.getpid()) > 0
    assert os.getpid() in start.descendants(os.getpid())
