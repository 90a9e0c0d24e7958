"""What a contender's process does: it answers lines of JSON with lines of JSON.

Only the standard library, because llama.cpp may have a Python of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]
Spent = tuple[float, float]
"""Seconds that passed, and seconds of CPU of all threads."""


def clock() -> Spent:
    """Return both clocks of now."""
    return time.perf_counter(), time.process_time()


def since(start: Spent) -> Spent:
    """Return what was spent since `clock` gave `start`."""
    now = clock()
    return now[0] - start[0], now[1] - start[1]


class Contender(Protocol):
    """A loaded model; tokens are chosen greedily."""

    versions: dict[str, str]

    def prefill(self, prompt: Sequence[int]) -> int:
        """Compute a prompt that is new to it and return the token after it."""

    def decode(self, prompts: Prompts, steps: int) -> Spent:
        """Generate `steps` tokens and more after all prompts; return what `steps` took.

        All prompts are computed before the time begins.
        """


def serve(contender: Contender) -> None:
    """Answer requests until the input ends."""
    _say({"ready": True, "versions": contender.versions})
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        if asked["kind"] == "prefill":
            start = clock()
            answer["token"] = contender.prefill(asked["prompts"][0])
            spent = since(start)
        else:
            spent = contender.decode(asked["prompts"], asked["steps"])
        answer["seconds"], answer["cpu_seconds"] = spent
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    print("\x1e" + json.dumps(answer), flush=True)
