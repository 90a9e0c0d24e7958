"""Backends of launches, and the outputs that slots read from them."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import eq
from typing import Any, NamedTuple

import numpy as np

from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.runtime.decode_slot import DecodeSlot, Resources, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR
from legato_engine.runtime.drafting import DraftingDecode
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE, write_logprobs
from legato_engine.runtime.staging import Changes, preparation
from legato_engine.scheduler.batch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD, Descriptor, RowTokens, SampledToken
from legato_engine.speculation import BlockPolicy


class Needs(NamedTuple):
    """Sampling features that a launch needs."""

    sampled: bool  # it is not greedy
    payload: bool  # its task has values
    logprobs: bool
    alternatives: bool = False  # to its tokens; never in a loop


class StepBackend(abc.ABC):
    """Enqueues the work of launches on the compute stream, captured once per shape.

    `prefill` and `encode` stage their own inputs, and `prefill` uploads all of the launch; the
    other methods read what the runner has uploaded.
    """

    limits: BatchLimits  # of a prefill that sequences share
    encodes_images = False  # takes uncropped images
    _has_greedy_work = True  # apart from that of sampled batches

    def __init__(self, resources: Resources, layouts: Sequence[StepLayout]) -> None:
        """`layouts`: the batches that forwards of drafting steps are made for."""
        self.buckets = resources.buckets  # tokens, ascending
        self._resources = resources
        self._slots, self._state = resources.slots, resources.state
        self._graphs = resources.graphs
        self._drafting = None
        if self._state.drafts is not None:
            self._drafting = DraftingDecode(resources, layouts)

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Capture or run every shape, so that no launch is the first of its shape."""

    def decode(
        self, slot: int, bucket: int, rank: int, num_tokens: int, *, forces: bool = False
    ) -> None:
        """Enqueue a forward of `num_tokens` with adapters up to `rank` (0: none).

        `forces`: rows have forced tokens, which matters with speculation only.
        """
        shape = self._forward_shape(bucket, num_tokens, rank)
        if self._drafting is not None:
            self._graphs.run(self._drafting_work, slot, shape[-1], forces)
        else:
            self._graphs.run(self._forward_work, slot, *shape)

    def prepare(self, slot: int, changes: Changes, *, admits: bool = False) -> None:
        """Apply what a launch changes, before its forward; `admits` its prompts."""
        if any(changes) or admits:
            self._graphs.run(self._prepare_work, slot, *changes, admits)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """Sample as `Needs` asks."""
        sampled = sampled and self._has_greedy_work
        self._graphs.run(self._sample_work, slot, bucket, sampled, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        """Compute them for what `sample` chose with this `payload`, and `alternatives` to it."""
        rows = self._logprob_rows(bucket)
        self._graphs.run(self._logprobs_work, slot, rows, payload, alternatives)

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        """Return the work of a step, in order, to be repeated at fixed addresses."""
        graphs, shape = self._graphs, self._forward_shape(bucket, bucket, rank)
        choice = needs.sampled and self._has_greedy_work, needs.payload
        if self._drafting is None:
            works = [
                graphs.captured(self._forward_work, slot, *shape),
                graphs.captured(self._sample_work, slot, bucket, *choice),
            ]
        else:
            works = [
                graphs.part(self._drafting_work, slot, shape[-1], False),
                graphs.part(self._drafting_sample_work, slot, *choice),
            ]
        if needs.logprobs:
            rows = self._logprob_rows(bucket)
            works.append(graphs.captured(self._logprobs_work, slot, rows, needs.payload, False))
        return tuple(works)

    @abc.abstractmethod
    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        """Offer the megakernel for up to `max_rows` rows, or return the reason why not.

        Rows draft by the `policy` if given.
        """

    @abc.abstractmethod
    def prefill(
        self,
        slot: int,
        prompts: Sequence[ScheduledSequence],
        decodes: Sequence[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        """Enqueue prompts, and decodes that share the launch, after its `changes`.

        The slot's first rows become the outputs of the decodes, then of each prompt's last
        position. `limits` bounds a launch of more than one prompt, or with any decode.
        """

    @abc.abstractmethod
    def encode(self, slot: int, row: ScheduledSequence) -> None: ...

    @abc.abstractmethod
    def _forward_shape(self, bucket: int, num_tokens: int, rank: int) -> tuple[int, int, int]:
        """Return the bucket, the groups and the adapters of `_forward_work`."""

    @abc.abstractmethod
    def _forward_work(
        self, slot: int, bucket: int, num_groups: int, rank: int, sampled: bool = True
    ) -> Work: ...

    @abc.abstractmethod
    def _sample_work(
        self, slot: int, bucket: int, sampled: bool, payload: bool, settles: bool = True
    ) -> Work: ...

    def _logprob_rows(self, bucket: int) -> int:
        return bucket

    def _prepare_work(self, slot: int, grows: bool, places: bool, admits: bool) -> Work:
        return preparation(self._resources, slot, Changes(grows, places), admits=admits)

    def _drafting_work(self, slot: int, rank: int, forces: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.work(slot, self._forward_work, rank, forces=forces)

    def _drafting_sample_work(self, slot: int, sampled: bool, payload: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.sampling(slot, self._sample_work, sampled, payload, False)

    def _logprobs_work(self, slot: int, rows: int, payload: bool, alternatives: bool) -> Work:
        given = self._resources, self._slots[slot], rows, payload, alternatives
        return lambda: write_logprobs(*given)


# ---------------------------------------------------------------- slot outputs

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
