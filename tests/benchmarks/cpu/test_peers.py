"""Contenders on a CPU, in turns, in processes of their own."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cpu import peers
from benchmarks.cpu.peers import Entrant, Process

STAND_IN = """
import sys
sys.path.insert(0, "benchmarks/cpu/peers")
import turn
class Fast:
    versions = {"fast": "1"}
    def prefill(self, prompt):
        print("noise of a library")
        return prompt[-1]
    def decode(self, prompts, steps):
        seconds = steps * len(prompts) / 100.0
        return seconds, 2 * seconds
turn.serve(Fast())
"""
FAST = Entrant("fast", "stand_in", ("", ""))


@pytest.fixture
def process():
    """A contender that decodes 100 tokens a second."""
    made = Process(FAST, [sys.executable, "-c", STAND_IN], {0})
    yield made
    made.end()


def test_turns_are_answered_among_other_output(process):
    """Rates are of tokens of all streams, and lines of libraries are no answers."""
    prompts = {"prefill": [[1, 2, 3]], "1 stream": [[4]], "4 streams": [[5], [6], [7], [8]]}
    found = peers._round([process], prompts, 20)["fast"]
    assert found["prefill"]["token"] == 3
    assert found["1 stream"]["per_second"] == pytest.approx(100.0)
    assert found["4 streams"]["per_second"] == pytest.approx(100.0)
    assert found["4 streams"]["cpu_ms"] == pytest.approx(20.0)


def test_a_contender_is_stopped_between_its_turns(process):
    """So its threads take no time from the others."""
    status = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + 60
    while status.read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline, "it runs"
        time.sleep(0.001)
    assert process.ask(kind="prefill", prompts=[[7]])["token"] == 7


def test_a_contender_that_does_not_start_says_why():
    """The last line of its errors."""
    with pytest.raises(RuntimeError, match="No module named 'llama_cpp_of_tests'"):
        Process(FAST, [sys.executable, "-c", "import llama_cpp_of_tests"], {0})


def test_a_comparison_takes_the_median_of_the_rounds_ratios():
    """Not the ratio of medians: both turns of a round met the same load. Absences have reasons."""
    ours, theirs = peers.PAIRS[0]
    speeds = [(3.0, 2.0), (0.3, 0.1), (1.0, 1.0)]
    rounds = [
        {
            name: {
                task: {"per_second": speed, "cpu_ms": 1.0 / speed, "token": 1.0}
                for task in peers.TASKS
            }
            for name, speed in zip((ours, theirs), pair, strict=True)
        }
        for pair in speeds
    ]
    options = argparse.Namespace(prompt=4, steps=2, weights=peers.FILE)
    two: Any = [SimpleNamespace(entrant=entrant, versions={}) for entrant in peers.ENTRANTS[:2]]
    figures = peers._figures(two, rounds, {"slow": "not here"}, options)
    assert figures["ratios"][f"{ours} / {theirs}"]["prefill"] == pytest.approx(
        {"median": 1.5, "least": 1.0, "most": 3.0, "by_cpu": 1.5}
    )
    assert figures["contenders"][ours]["tasks"]["prefill"] == pytest.approx(
        {"median": 1.0, "least": 0.3, "most": 3.0, "cpu_ms": 1.0}
    )
    assert figures["absent"] == {"slow": "not here"}
    assert any("1.50 (1.00-3.00) [1.50]" in line for line in peers._tables(figures))


def test_pairs_take_turns_at_being_first():
    """The second of a pair begins in every other round, and pairs stay together."""
    running: Any = [SimpleNamespace(entrant=entrant) for entrant in peers.ENTRANTS[:4]]
    first, second, third, fourth = running
    assert peers._order(running, 0) == [first, second, third, fourth]
    assert peers._order(running, 1) == [second, first, fourth, third]
