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


class Contender(Protocol):
    """A loaded model; tokens are chosen greedily."""

    versions: dict[str, str]

    def prefill(self, prompt: Sequence[int]) -> int:
        """Compute a prompt that is new to it and return the token after it."""
        ...

    def decode(self, prompts: Prompts, steps: int) -> float:
        """Generate `steps` tokens and more after all prompts; return the seconds of `steps`.

        All prompts are computed before the time begins.
        """
        ...


def serve(contender: Contender) -> None:
    """Answer requests until the input ends."""
    _say({"ready": True, "versions": contender.versions})
    for line in sys.stdin:
        asked = json.loads(line)
        used, start = time.process_time(), time.perf_counter()
        answer: dict[str, Any]
        if asked["kind"] == "prefill":
            answer = {"token": contender.prefill(asked["prompts"][0])}
            answer["seconds"] = time.perf_counter() - start
        else:
            answer = {"seconds": contender.decode(asked["prompts"], asked["steps"])}
        _say({**answer, "cpu_seconds": time.process_time() - used})


def _say(answer: dict[str, Any]) -> None:
    print("\x1e" + json.dumps(answer), flush=True)
