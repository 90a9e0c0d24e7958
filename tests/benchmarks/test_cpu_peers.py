"""Contenders on a CPU, in turns, in processes of their own."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import cpu_peers
from benchmarks.cpu_peers import Entrant, Process

STAND_IN = """
import sys
sys.path.insert(0, "benchmarks/cpu_peers")
import turn
class Fast:
    versions = {"fast": "1"}
    def prefill(self, prompt):
        print("noise of a library")
        return prompt[-1]
    def decode(self, prompts, steps):
        return steps * len(prompts) / 100.0
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
    found = cpu_peers._round([process], prompts, 20)["fast"]
    assert found["prefill"]["token"] == 3
    assert found["1 stream"]["per_second"] == pytest.approx(100.0)
    assert found["4 streams"]["per_second"] == pytest.approx(100.0)


def test_a_contender_that_does_not_start_says_why():
    """The last line of its errors."""
    with pytest.raises(RuntimeError, match="No module named 'llama_cpp_of_tests'"):
        Process(FAST, [sys.executable, "-c", "import llama_cpp_of_tests"], {0})


def test_the_least_and_the_most_stand_beside_the_median(process):
    """Of all rounds, with the reasons of those that are absent."""
    rounds = [{"fast": {"prefill": {"per_second": rate, "token": 1.0}}} for rate in (3.0, 1.0, 2.0)]
    options = argparse.Namespace(prompt=4, steps=2, weights=cpu_peers.FILE)
    figures = cpu_peers._figures([process], rounds, {"slow": "not here"}, options)
    assert figures["contenders"]["fast"]["tasks"]["prefill"] == {
        "per_second": 2.0,
        "least": 1.0,
        "most": 3.0,
    }
    assert figures["absent"] == {"slow": "not here"}
