"""Interface of backends, and the outputs that slots read from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Sequence as Many
from itertools import repeat
from operator import eq
from typing import Any, NamedTuple, Protocol

import numpy as np

from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.descriptors import DESCRIPTOR
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE
from legato_engine.runtime.staging import Changes
from legato_engine.scheduler.batch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD, Descriptor, RowTokens, SampledToken
from legato_engine.speculation import BlockPolicy


class Needs(NamedTuple):
    """Sampling features that a launch needs."""

    sampled: bool  # it is not greedy
    payload: bool  # its task has values
    logprobs: bool
    alternatives: bool = False  # to its tokens; never in a loop


class StepBackend(Protocol):
    """Enqueues the work of launches on the compute stream.

    `prefill` and `encode` stage their own inputs, and `prefill` uploads all of the launch; the
    other methods read what the runner has uploaded.
    """

    buckets: tuple[int, ...]  # tokens, ascending
    limits: BatchLimits  # of a prefill that sequences share
    encodes_images: bool  # takes uncropped images

    def warm_up(self) -> None:
        """Capture or run every shape, so that no launch is the first of its shape."""
        ...

    def decode(
        self, slot: int, bucket: int, rank: int, num_tokens: int, *, forces: bool = False
    ) -> None:
        """Enqueue a forward of `num_tokens` with adapters up to `rank` (0: none).

        `forces`: rows have forced tokens, which matters with speculation only.
        """
        ...

    def prepare(self, slot: int, changes: Changes) -> None:
        """Apply what a decode changes, before its forward."""
        ...

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """Sample as `Needs` asks."""
        ...

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        """Return the work of a step, in order, to be repeated at fixed addresses."""
        ...

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        """Offer the megakernel for up to `max_rows` rows, or return the reason why not.

        Rows draft by the `policy` if given.
        """
        ...

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        """Compute them for what `sample` chose with this `payload`, and `alternatives` to it."""
        ...

    def prefill(
        self,
        slot: int,
        prompts: Many[ScheduledSequence],
        decodes: Many[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        """Enqueue prompts, and decodes that share the launch, after its `changes`.

        The slot's first rows become the outputs of the decodes, then of each prompt's last
        position. `limits` bounds a launch of more than one prompt, or with any decode.
        """
        ...

    def encode(self, slot: int, row: ScheduledSequence) -> None: ...


# ---------------------------------------------------------------- slot outputs

# What rows need of a launch's sampling, and the tokens that it left in its slot's outputs.

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
    """Return whether most adjacent rows share their first page."""
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
    """Return each row's accepted tokens, () for a row without any; a row's outputs are adjacent."""
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
