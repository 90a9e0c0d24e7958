"""Schedulers whose rows all decode, for the guard."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from legato_engine.bench.workload import fixed_length
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.scheduler.batch import LaunchKind, StepRecord
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.types import QueryTask, Request, RequestKey, SamplingParams

ROWS = 4
RANKS = {"x": 8, "y": 64}
"""Adapters by name."""


def close(assembly: Assembly) -> None:
    """Give its memory back."""
    assembly.device.close()
    gc.collect()
    torch.cuda.empty_cache()


class Decodes(SilentSink):
    """Counts of committed launches.

    By kind, with draft tokens, prompts with a loop's rows, parts of prompts, and loops whose
    constraints follow tokens in flight.
    """

    def __init__(self) -> None:
        self.kinds: list[LaunchKind] = []
        self.drafted = self.behind = self.parts = self.following = 0

    def committed(self, record: StepRecord) -> None:
        """Count it."""
        self.kinds.append(record.launch.plan.kind)
        self.drafted += record.drafted
        plan = record.launch.plan
        self.behind += bool(plan.behind and plan.prefills)
        self.parts += plan.has_partial_prefill
        self.following += bool(plan.after)


def decoding(
    assembly: Assembly, seen: Decodes, *, length: int, adapters: tuple[str, ...] = ()
) -> Scheduler:
    """Return a scheduler whose rows all decode, and have answers of `length` tokens."""
    scheduler = assembly.scheduler(seen, pipeline_depth=2, observer=seen.committed)
    frontend, model = assembly.frontend, assembly.model
    for index in range(ROWS):
        request = Request(
            request_id=RequestKey(str(index)),
            task=QueryTask(question="What? " * 3),
            sampling=SamplingParams(temperature=0.8 * (index % 2), seed=index),
        )
        adapter = None
        if index < len(adapters):
            name = adapters[index]
            data = (Path(assembly.config.adapters) / f"{name}.safetensors").read_bytes()
            adapter = model.read_adapter(data, name, max(RANKS.values()))
        sequence = make_sequence(frontend, request, None, adapter)
        constraints = range(len(frontend.constraints))
        scheduler.submit(fixed_length(sequence, length, 0, constraints))
    for _ in range(2 * ROWS + 4):
        scheduler.step()
    assert scheduler.load().running == ROWS
    return scheduler
