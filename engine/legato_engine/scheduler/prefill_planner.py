"""The next prefill: which sequences leave the queue, and whose image is encoded."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefill_work import PrefillWork
from legato_engine.scheduler.launch import (
    ALONE,
    BatchLimits,
    LaunchKind,
    Plan,
    ScheduledSequence,
)
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence

_SHORT_ANSWER = 8
"""Answers of fewer tokens may be delayed by launches with several images."""


@dataclasses.dataclass(slots=True, eq=False)
class _Admitted:
    """An admitted sequence and what its next launch has to do."""

    sequence: Sequence
    work: PrefillWork


class PrefillPlanner:
    """Admits sequences in the order of the `WaitingQueue`, as far as they fit.

    Between the encodes of an image and its prefill no other sequence is planned, because the device
    has one feature buffer.

    Short prompts share a launch within `limits`. An image to compute begins a launch, so that no
    earlier request waits for it.

    Several images share a launch only while many requests wait. Each added image delays the whole
    launch but saves queued requests part of a pass over the weights. None is added to the decodes
    of a long answer, because it would delay each of its tokens.
    """

    def __init__(
        self, manager: KVCacheManager, queue: WaitingQueue, limits: BatchLimits = ALONE
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._queue = queue
        self._encoding: _Admitted | None = None  # its image is encoded in part

    def __len__(self) -> int:
        """Count the waiting sequences, without the one whose image is being encoded."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or its image is being encoded."""
        return bool(self._queue) or self._encoding is not None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits an empty pool."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence before its prefill is planned; the caller releases its resources."""
        if self._encoding is not None and self._encoding.sequence is sequence:
            self._encoding = None
        else:
            self._queue.remove(sequence)

    def plan(
        self,
        max_crops: int = 0,
        decodes: tuple[ScheduledSequence, ...] = (),
        *,
        streaming: bool = False,
    ) -> Plan | None:
        """Admit sequences and plan their prefill, or encode a part of an image.

        Returns None if no sequence waits or fits. An admission takes a row and pages, so the plan
        must be launched.

        Args:
            max_crops: most crops per encode; 0 leaves the rest of the image to the prefill.
            decodes: join the launch, all or none, if they fit with the first prompt.
            streaming: whether a decode streams its tokens; then at most one image is computed.
        """
        first = self._encoding or self._admit_next()
        if first is None:
            return None
        if _is_split(first, max_crops):
            return self._encode(first, max_crops)
        self._encoding = None
        self._manager.planned(first.sequence)
        max_images = 0 if streaming or not self._may_add_images(decodes) else self._limits.images
        if not self._fits(first.sequence, len(decodes), len(decodes)):
            decodes = ()
        prompts = self._gather(first, len(decodes), max_images)
        return Plan(LaunchKind.PREFILL, (*decodes, *prompts), len(decodes))

    def _gather(
        self, first: _Admitted, num_decodes: int, max_images: int
    ) -> list[ScheduledSequence]:
        """Collect the prompts of a launch with `num_decodes` decodes, images to compute first."""
        limits = self._limits
        row, num_tokens = _schedule(first), num_decodes + _max_scheduled_tokens(first.sequence)
        computes_image = first.sequence.image_prefix_length > 0 and bool(first.work.compute_pages)
        if computes_image and not first.sequence.num_crops:
            max_images = 0  # the encoder does not support this image
        images, others = ([row], []) if computes_image else ([], [row])
        while limits.prompts > 1 and (sequence := self._next()) is not None:
            num_rows = num_decodes + len(images) + len(others)
            if not self._fits(sequence, num_tokens, num_rows):
                break
            cached = self._manager.finds_image_prefix(sequence)
            num_images = len(images) + (not cached)
            if len(others) + cached + min(1, num_images) > limits.prompts:
                break
            if not cached and (num_images > max_images or not sequence.num_crops):
                break
            num_tokens += _max_scheduled_tokens(sequence)
            row = _schedule(self._admit(sequence))
            if cached:
                others.append(row)
            else:
                self._manager.planned(sequence)
                images.append(row)
        return [*images, *others]

    def _next(self) -> Sequence | None:
        if self._manager.rows_free == 0:
            return None
        return self._queue.first(self._manager.can_admit, self._manager.lacks_adapter_slot)

    def _admit_next(self) -> _Admitted | None:
        sequence = self._next()
        return None if sequence is None else self._admit(sequence)

    def _admit(self, sequence: Sequence) -> _Admitted:
        self._queue.take(sequence)
        return _Admitted(sequence, self._manager.admit(sequence))

    def _encode(self, admitted: _Admitted, max_crops: int) -> Plan:
        sequence, work = admitted.sequence, admitted.work
        self._encoding = admitted
        stop = min(work.first_crop + max_crops, sequence.num_crops)
        admitted.work = dataclasses.replace(work, first_crop=stop)
        part = dataclasses.replace(work, stop_crop=stop)
        row = ScheduledSequence(sequence, sequence.prefix_length, 0, part)
        return Plan(LaunchKind.ENCODE, (row,))

    def _may_add_images(self, decodes: tuple[ScheduledSequence, ...]) -> bool:
        """Whether enough requests wait, and all answers in the launch are short."""
        if self._limits.images == 1 or len(self._queue) < self._limits.min_queue_length:
            return False
        return all(row.sequence.progress.num_launched < _SHORT_ANSWER for row in decodes)

    def _fits(self, sequence: Sequence, num_tokens: int, num_rows: int) -> bool:
        """Whether its prompt fits into a launch of `num_tokens` tokens in `num_rows` rows."""
        limits = self._limits
        return (
            limits.prompts > 1
            and num_rows < limits.sampled
            and num_tokens + _max_scheduled_tokens(sequence) <= limits.tokens
        )


def _is_split(admitted: _Admitted, max_crops: int) -> bool:
    work = admitted.work
    if max_crops == 0 or not work.compute_pages:
        return False
    return (work.first_crop or max_crops) < admitted.sequence.num_crops


def _max_scheduled_tokens(sequence: Sequence) -> int:
    """Return the most input tokens of its prefill, including BOS without an image after it."""
    return sequence.length - sequence.image_prefix_length


def _schedule(admitted: _Admitted) -> ScheduledSequence:
    """Schedule what is not cached of the prompt and, after a preemption, of the answer."""
    sequence = admitted.sequence
    position = max(sequence.pages.cached_length, sequence.prefix_length)
    return ScheduledSequence(sequence, position, sequence.length - position, admitted.work)
