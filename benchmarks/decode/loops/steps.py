"""Milliseconds of a decode step of equal answers, and of lists."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from legato_engine.bench.workload import Workload
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import CachedImageRef, DetectSpec, Request, RequestKey, SamplingParams

from benchmarks.decode.loops.decodes import Decodes, picture, recorded

_MS = 1e3


def steps_of(
    assembly: Assembly, streams: int, length: int, context: int, depth: int = 2
) -> dict[str, Any]:
    """One run of equal answers."""
    workload = Workload(assembly, kind="query", count=streams, length=length, context=context)
    return timed_steps(assembly, workload.sequences(), depth)


def lists_of(assembly: Assembly, streams: int, num_objects: int, depth: int = 2) -> dict[str, Any]:
    """One run of lists of as many objects about a known image, which cannot end before."""
    image = picture(assembly)
    with endless_lists(assembly):
        sequences = []
        for index in range(streams):
            request = Request(
                request_id=RequestKey(f"list-{index}"),
                task=DetectSpec(object=f"thing {index}", max_objects=num_objects),
                image=CachedImageRef(image_id="picture"),
                sampling=SamplingParams(max_tokens=3 * num_objects + 1),
            )
            sequences.append(make_sequence(assembly.frontend, request, image))
        return timed_steps(assembly, sequences, depth)


@contextlib.contextmanager
def endless_lists(assembly: Assembly) -> Iterator[None]:
    """Where a coordinate may come, the end of the list may not."""
    constraints_CV = assembly.runner._resources.constraints_CV
    before_CV = constraints_CV.clone()
    for index, constraint in enumerate(assembly.frontend.constraints):
        allowed = constraint.allowed or ()
        if len(allowed) == 2:  # a coordinate or the end
            end = min(allowed)
            constraints_CV[index, end] = -torch.inf
    yield
    constraints_CV.copy_(before_CV)


def timed_steps(assembly: Assembly, sequences: list[EngineSequence], depth: int) -> dict[str, Any]:
    """Milliseconds of a step of all sequences, and what the host had to do."""
    streams = len(sequences)
    tasks = recorded(sequences)
    run = Decodes.timed(assembly, at_once=streams, depth=depth)
    for sequence in sequences:
        run.scheduler.submit(sequence)
    while any(len(task.tokens) < 2 for task in tasks):
        run.scheduler.step()
    launches, waits, cpu = run.launches, run.waits, time.process_time()
    have = len(tasks[0].tokens)
    run.scheduler.drain()
    cpu = time.process_time() - cpu
    begin = max(task.times[1] for task in tasks)
    end = min(task.times[-1] for task in tasks)
    num_steps = min(len(task.times) for task in tasks) - 2
    return {
        "ms": (end - begin) / num_steps * _MS,
        "host_us": cpu * 1e6 / (len(tasks[0].tokens) - have) / streams,
        "launches": run.launches - launches,
        "waits": run.waits - waits,
        "tokens": [task.tokens for task in tasks],
    }
