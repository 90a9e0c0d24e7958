"""What rows need of a launch's sampling, and the tokens that it left in its slot's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import eq
from typing import Any

import numpy as np

from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.request_descriptors import DESCRIPTOR, Descriptor
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE
from legato_engine.scheduler.launch import ScheduledSequence
from legato_engine.scheduler.runner import RowTokens
from legato_engine.sequence import NO_PAYLOAD
from legato_engine.tasks import SampledToken

Outputs = Mapping[str, np.ndarray]
"""A slot's outputs by field, on the host."""


def needs_of(rows: Sequence[ScheduledSequence]) -> Needs:
    sampled = payload = logprobs = alternatives = False
    for row in rows:
        task, request = row.sequence.task, row.sequence.request
        sampled = sampled or (task.sampling.temperature or 0.0) > GREEDY_TEMPERATURE
        payload = payload or task.has_payload
        logprobs = logprobs or request.logprobs
        alternatives = alternatives or request.top_logprobs > 0
    return Needs(sampled, payload, logprobs, alternatives)


def have_common_pages(rows: Sequence[ScheduledSequence]) -> bool:
    """Whether most begin with the page of the row before, as requests about one image do."""
    first = [row.sequence.pages.ids[0] for row in rows]
    same: int = sum(map(eq, first, first[1:]))
    return 2 * same >= len(rows)


def sampled_tokens(
    outputs: Outputs, slot: DecodeSlot, count: int, needs: Needs
) -> list[SampledToken]:
    """Return the tokens of `count` rows.

    Fields that the launch did not need are left from an earlier launch of the slot.
    """
    fields: list[Iterable[Any]] = [
        outputs["token"][:count].tolist(),
        map(tuple, outputs["payload"][:count].tolist()) if needs.payload else repeat(NO_PAYLOAD),
        outputs["logprob"][:count].tolist() if needs.logprobs else repeat(None),
        map(tuple, outputs["certainty"][:count].tolist()) if needs.payload else repeat(None),
        _alternatives(slot, count) if needs.alternatives else repeat(()),
    ]
    return list(map(SampledToken._make, zip(*fields, strict=False)))


def drafted_tokens(
    outputs: Outputs, slot: DecodeSlot, num_rows: int, needs: Needs
) -> list[RowTokens]:
    """The accepted tokens; those of a row are adjacent, and one without tokens has none."""
    counts = outputs["count"][:num_rows].tolist()
    proposed = outputs["proposed"][:num_rows].tolist()
    tokens = sampled_tokens(outputs, slot, sum(proposed) + num_rows, needs)
    rows, first = [], 0
    learnt_S = outputs["descriptor"][:num_rows].view(DESCRIPTOR)[:, 0]
    descriptors = map(Descriptor._make, learnt_S.tolist())
    for count, drafted, learnt in zip(counts, proposed, descriptors, strict=True):
        accepted = tuple(tokens[first : first + count])
        rows.append(RowTokens(accepted, drafted, learnt))
        first += 1 + drafted if count else 0
    return rows


def _alternatives(slot: DecodeSlot, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Without the tokens that a constraint forbids."""
    host = slot.alternatives.host
    tokens, logprobs = (host[name][:count].tolist() for name in ("token", "logprob"))
    return [
        tuple((token, likely) for token, likely in zip(*row, strict=True) if likely > -math.inf)
        for row in zip(tokens, logprobs, strict=True)
    ]
