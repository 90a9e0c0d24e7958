"""Legato's engine without its service: `python -m benchmarks.cpu.peers.legato FILE DTYPE KIND`."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many

import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import make_sequence
from legato_engine.errors import LegatoError
from legato_engine.sequence import Sequence, tokens_of
from legato_engine.types import (
    Event,
    FinishReason,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)

from benchmarks.cpu.peers import turn

_SPARE = 4  # tokens after the timed ones, so that no sequence ends while others are timed


class _Counter:
    """A sink that notes the time of every token of every request."""

    def __init__(self) -> None:
        self.times: dict[int, list[turn.Spent]] = {}
        self.first: dict[int, int] = {}

    def started(self, sequence: Sequence) -> None:
        self.times[sequence.seq_id] = []

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        now = turn.clock()
        tokens = list(tokens_of(events))
        if tokens:
            self.first.setdefault(sequence.seq_id, tokens[0].token_id)
        self.times[sequence.seq_id] += [now] * len(tokens)

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        assert finish_reason is FinishReason.LENGTH, "an answer ended early"

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        raise error


class Legato:
    """The engine's scheduler and runner in this process, at the default pipeline depth."""

    def __init__(self, path: str, dtype: str, kind: str, threads: int) -> None:
        config = EngineConfig(
            weights=path,
            device="cpu",
            dtype=dtype,
            weight_dtype=kind,
            threads=threads,
            max_context=2048,
            max_running=4,
        )
        self._depth = config.pipeline_depth
        self._assembly = assemble(config)
        self.versions = {"torch": str(torch.__version__)}

    def prefill(self, prompt: Many[int]) -> int:
        (first,) = self._run([prompt], 1).first.values()
        return first

    def decode(self, prompts: turn.Prompts, steps: int) -> turn.Spent:
        times = self._run(prompts, steps + len(prompts) + _SPARE).times.values()
        begin = max(each[0] for each in times)
        after = sorted(time for each in times for time in each if time > begin)
        end = after[steps * len(prompts) - 1]
        return end[0] - begin[0], end[1] - begin[1]

    def _run(self, prompts: turn.Prompts, tokens: int) -> _Counter:
        counter, frontend = _Counter(), self._assembly.frontend
        scheduler = self._assembly.scheduler(counter, pipeline_depth=self._depth)
        for index, prompt in enumerate(prompts):
            request = Request(
                request_id=RequestKey(str(index)),
                task=QuerySpec(question="replaced below"),
                sampling=SamplingParams(temperature=0.0, max_tokens=tokens),
                return_tokens=True,
            )
            task = frontend.make_task(request)
            task.prompt = tuple(map(PromptToken, prompt))
            scheduler.submit(make_sequence(frontend, request, None, task=task))
        scheduler.drain()
        return counter


if __name__ == "__main__":
    path, dtype, kind, threads = sys.argv[1:5]
    turn.serve(Legato(path, dtype, kind, int(threads)))
