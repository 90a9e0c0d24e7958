"""Who leaves the waiting queue next, and whose picture is being encoded."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefill_work import PrefillWork
from legato_engine.scheduler.launch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence

_FIRST_TOKENS = 8
"""Of an answer: those that may wait for several pictures each."""


@dataclasses.dataclass(slots=True, eq=False)
class _Encoding:
    """An admitted sequence, with a part of its picture encoded or none yet."""

    sequence: Sequence
    work: PrefillWork  # its `first_crop` is the next to encode


class PrefillPlanner:
    """Admits those who wait, in the order of their `WaitingQueue`, as far as they fit.

    Once a part of a picture is encoded, its sequence is the only one planned until its prefill: the
    device has one feature buffer.

    Short prompts share a launch, as `limits` has it. A picture to be computed begins one, so that
    nobody waits for a picture who would have run before it; those who join have been in the queue
    behind it, and may ask about that very picture. Adapters make no difference.

    Only while a crowd waits do pictures join, in front of all other prompts: they cost whoever is
    in the launch already their time, and spare everybody behind it a part of a pass each. Nor do
    they join once an answer is longer than most short ones, which would wait for each of its tokens
    as long.
    """

    def __init__(
        self, manager: KVCacheManager, queue: WaitingQueue, limits: BatchLimits = ALONE
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._queue = queue
        self._encoding: _Encoding | None = None

    def __len__(self) -> int:
        """Sequences waiting; one whose picture is being encoded waits no more."""
        return len(self._queue)

    @property
    def due(self) -> bool:
        """Whether `plan` has anything to look at."""
        return bool(self._queue) or self._encoding is not None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller knows that it fits an empty pool."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose prefill is not planned yet; what it holds is the caller's."""
        if self._encoding is not None and self._encoding.sequence is sequence:
            self._encoding = None
            return
        self._queue.remove(sequence)

    def plan(
        self,
        max_crops: int = 0,
        riding: tuple[ScheduledSequence, ...] = (),
        *,
        streams: bool = False,
    ) -> Plan | None:
        """Admit what fits and plan its prefill; None when nothing fits or nothing waits.

        A picture of more than `max_crops` crops that nobody has computed is encoded first, that
        many crops at a time; 0 never splits, and lets the prefill encode what is left of a picture
        already begun. Admission takes the row and the pages, so a plan that is returned must be
        launched. All of `riding` decode in the launch, or none where they do not fit beside its
        first prompt. While somebody `streams`, it computes one picture at most.
        """
        begun = self._encoding or self._begin()
        if begun is None:
            return None
        if _is_split(begun, max_crops):
            return self._encode(begun, max_crops)
        self._encoding = None
        self._manager.planned(begun.sequence)
        most_pictures = 0 if streams or not self._is_crowded(riding) else self._limits.images
        if not self._joins(begun.sequence, len(riding), len(riding)):
            riding = ()
        prompts = self._gather(begun, len(riding), most_pictures)
        return Plan(LaunchKind.PREFILL, (*riding, *prompts), len(riding))

    def _gather(
        self, begun: _Encoding, num_mixed_decodes: int, most_pictures: int
    ) -> list[ScheduledSequence]:
        """Whose prefill begins a launch and who joins it, behind so many riders; pictures first."""
        limits, first = self._limits, begun.sequence
        row, num_tokens = (
            _prefill_row(first, begun.work),
            num_mixed_decodes + _max_scheduled_tokens(first),
        )
        computes = first.image_prefix_length > 0 and bool(begun.work.compute_pages)
        if computes and not first.num_crops:
            most_pictures = 0  # the encoder does not take it
        pictures, others = ([row], []) if computes else ([], [row])
        while limits.prompts > 1 and (sequence := self._next()) is not None:
            num_rows = num_mixed_decodes + len(pictures) + len(others)
            if not self._joins(sequence, num_tokens, num_rows):
                break
            known = self._manager.finds_image_prefix(sequence)
            num_pictures = len(pictures) + (not known)
            if len(others) + known + min(1, num_pictures) > limits.prompts:
                break
            if not known and (num_pictures > most_pictures or not sequence.num_crops):
                break
            num_tokens += _max_scheduled_tokens(sequence)
            row = _prefill_row(sequence, self._admit(sequence))
            if known:
                others.append(row)
            else:
                self._manager.planned(sequence)
                pictures.append(row)
        return [*pictures, *others]

    def _next(self) -> Sequence | None:
        """Who is served next, None when nobody fits."""
        if self._manager.rows_free == 0:
            return None
        return self._queue.first(self._manager.can_admit, self._manager.lacks_adapter_slot)

    def _begin(self) -> _Encoding | None:
        """Who is served next, admitted."""
        sequence = self._next()
        return None if sequence is None else _Encoding(sequence, self._admit(sequence))

    def _admit(self, sequence: Sequence) -> PrefillWork:
        self._queue.take(sequence)
        return self._manager.admit(sequence)

    def _encode(self, encoding: _Encoding, max_crops: int) -> Plan:
        """The next crops of a picture."""
        sequence, work = encoding.sequence, encoding.work
        self._encoding = encoding
        stop = min(work.first_crop + max_crops, sequence.num_crops)
        encoding.work = dataclasses.replace(work, first_crop=stop)
        part = dataclasses.replace(work, stop_crop=stop)
        return Plan(
            LaunchKind.ENCODE, (ScheduledSequence(sequence, sequence.prefix_length, 0, part),)
        )

    def _is_crowded(self, riding: tuple[ScheduledSequence, ...]) -> bool:
        """Whether so many wait, and decode so little, that more pictures may join a launch."""
        if self._limits.images == 1 or len(self._queue) < self._limits.min_queue_length:
            return False
        return all(row.sequence.progress.num_launched < _FIRST_TOKENS for row in riding)

    def _joins(self, sequence: Sequence, num_tokens: int, num_rows: int) -> bool:
        """Whether its prompt fits a launch beside so many tokens of others, in so many rows."""
        limits = self._limits
        return (
            limits.prompts > 1
            and num_rows < limits.sampled
            and num_tokens + _max_scheduled_tokens(sequence) <= limits.tokens
        )


def _is_split(begun: _Encoding, max_crops: int) -> bool:
    """Whether crops are to be encoded ahead of the prefill."""
    if max_crops == 0 or not begun.work.compute_pages:
        return False
    return (begun.work.first_crop or max_crops) < begun.sequence.num_crops


def _max_scheduled_tokens(sequence: Sequence) -> int:
    """Tokens that its prefill feeds at most; BOS is one where no picture follows it."""
    return sequence.length - sequence.image_prefix_length


def _prefill_row(sequence: Sequence, work: PrefillWork) -> ScheduledSequence:
    """Feed what is not found: the rest of the prompt, and of the answer after a preemption."""
    position = max(sequence.pages.cached_length, sequence.prefix_length)
    return ScheduledSequence(sequence, position, sequence.length - position, work)
