"""Prefill planning with chunked prefill.

Decodes run in the last pass over the weights of their launch, or not at all beside a long prompt.
So a launch with many tokens makes them wait.
"""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import NO_PREFILL_WORK, KVCacheManager, PrefillWork
from legato_engine.scheduler.batch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence

_FEW_MORE_PASSES = 4 / 3
"""Passes of a prompt in parts, to those of the whole."""


def shared_part(
    num_tokens: int, num_beside: int, limits: BatchLimits, *, others_wait: bool, may_join: bool
) -> int:
    """Tokens of the next launch, of a prompt of so many; 0: it is not cut.

    `num_beside` decodes share the launch; 0: all decodes have one of their own after it.

    Parts beside decodes are the smallest that add few passes, or none while other prompts wait,
    which these delay. If all add more, a prompt too long to share a launch has the largest, and any
    other is whole; so it is where another `may_join` it.
    """
    size = limits.pass_tokens
    fits = num_tokens + num_beside <= limits.tokens
    if not size or num_tokens + num_beside <= size or (fits and (may_join or not num_beside)):
        return 0
    largest = limits.tokens // size * size - num_beside
    if not num_beside:
        return largest
    most: float = -(-(num_tokens + num_beside if fits else num_tokens) // size)
    most *= 1 if others_wait else _FEW_MORE_PASSES
    for room in range(size - num_beside, min(largest + 1, num_tokens), size):
        if _num_passes(num_tokens, room, num_beside, size) <= most:
            return room
    return 0 if fits else largest


def _num_passes(num_tokens: int, room: int, num_beside: int, size: int) -> int:
    """Count the passes of `size` tokens for a prompt chunked by `room` tokens beside decodes."""
    num_parts, rest = divmod(num_tokens, room)
    last = -(-(rest + num_beside) // size) if rest else 0
    return num_parts * ((room + num_beside) // size) + last


# ---------------------------------------------------------------- prefill planner

# The next prefill.

_SHORT_ANSWER = 8
"""Tokens; shorter answers may be delayed by launches with several images."""


@dataclasses.dataclass(slots=True, eq=False)
class _Admitted:
    """An admitted sequence, computed up to `position`; after a preemption its answer is computed,
    too.
    """

    sequence: Sequence
    work: PrefillWork
    position: int

    @property
    def num_left(self) -> int:
        """Tokens to compute, with BOS."""
        return self.sequence.length - self.position + self.num_bos

    @property
    def num_prompt_left(self) -> int:
        """Without an answer before a preemption."""
        return self.num_left - self.sequence.num_committed

    @property
    def num_bos(self) -> int:
        """BOS is computed with the prompt, but is no token of it."""
        return int(bool(self.work.compute_pages) and not self.sequence.image_prefix_length)

    def schedule(self, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` of `num_left`."""
        num_scheduled = num_tokens - self.num_bos
        return ScheduledSequence(self.sequence, self.position, num_scheduled, self.work)


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    """A shared prefill launch."""

    limits: BatchLimits
    decodes: tuple[ScheduledSequence, ...]
    max_images: int
    images: list[ScheduledSequence] = dataclasses.field(default_factory=list)  # to compute
    others: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    num_tokens: int = 0  # of the prompts

    def has_room(self, num_tokens: int) -> bool:
        num_rows = len(self.decodes) + len(self.images) + len(self.others)
        return (
            self.limits.prompts > 1
            and num_rows < self.limits.sampled
            and len(self.decodes) + self.num_tokens + num_tokens <= self.limits.tokens
        )

    def accepts(self, sequence: Sequence, *, computes_image: bool) -> bool:
        num_images = len(self.images) + computes_image
        num_prompts = len(self.others) + (not computes_image) + min(1, num_images)
        if num_prompts > self.limits.prompts or not self.has_room(_most_tokens(sequence)):
            return False
        return not computes_image or (num_images <= self.max_images and sequence.num_crops > 0)

    def add(self, admitted: _Admitted, *, computes_image: bool) -> None:
        self.num_tokens += admitted.num_left
        row = admitted.schedule(admitted.num_left)
        (self.images if computes_image else self.others).append(row)

    def plan(self) -> Plan:
        rows = (*self.decodes, *self.images, *self.others)
        return Plan(LaunchKind.PREFILL, rows, len(self.decodes))


class PrefillPlanner:
    """Admits sequences in the order of the `WaitingQueue`, as far as they fit.

    Between the encodes of an image and its prefill no other sequence is planned, because the device
    has one feature buffer; nor between the parts of a prompt.

    Decodes wait for the passes of a prompt over the weights. So a prompt of several passes may be
    cut into parts, one for each launch.

    Short prompts share a launch within `limits`. An image to compute begins a launch, so that no
    earlier request waits for it.

    Several images share a launch only while many requests wait: each delays the whole launch but
    saves queued requests part of a pass over the weights. None joins the decodes of a long answer,
    because it would delay each of its tokens.
    """

    def __init__(
        self, manager: KVCacheManager, queue: WaitingQueue[Sequence], limits: BatchLimits = ALONE
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._queue = queue
        self._begun: _Admitted | None = None  # its image is encoded in part, or its prompt computed
        self._found_none = False  # when it last looked for a sequence to admit

    def __len__(self) -> int:
        """Count the waiting sequences, without the one that has begun."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._begun is not None

    @property
    def expects_plan(self) -> bool:
        """Return whether `plan` will probably return a plan; much cheaper than planning."""
        may_admit = bool(self._queue) and self._manager.rows_free > 0 and not self._found_none
        return self._begun is not None or may_admit

    def add(self, sequence: Sequence) -> None:
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence before all of its prefill is planned; the caller releases it."""
        if self._begun is not None and self._begun.sequence is sequence:
            self._begun = None
        else:
            self._queue.remove(sequence)

    def plan(
        self,
        max_crops: int = 0,
        decodes: tuple[ScheduledSequence, ...] = (),
        *,
        streaming: bool = False,
    ) -> Plan | None:
        """Admit sequences and plan their prefill, or a part of one, or encode a part of an image.

        An admission takes a row and pages, so the plan must be launched.

        Args:
            max_crops: most crops per encode; 0 leaves the rest of the image to the prefill.
            decodes: join the launch, all or none, if they fit with the first prompt.
            streaming: a decode streams; then at most one image is computed.
        """
        first = self._begun or self._admit_next()
        if first is None:
            return None
        if _is_split(first, max_crops):
            return self._encode(first, max_crops)
        self._begun = None
        self._manager.planned(first.sequence)
        if self._limits.is_long(first.sequence):
            return self._long_prompt(first, others_decode=bool(decodes))
        if (part := self._shared_part(first, decodes)) is not None:
            return part
        batch = _Batch(self._limits, decodes, self._max_images(first, decodes, streaming))
        if not batch.has_room(first.num_left):
            batch = dataclasses.replace(batch, decodes=())
        batch.add(first, computes_image=_computes_image(first))
        self._fill(batch)
        return batch.plan()

    def _fill(self, batch: _Batch) -> None:
        while self._limits.prompts > 1 and (sequence := self._next()) is not None:
            cached = self._manager.finds_image_prefix(sequence)
            if not batch.accepts(sequence, computes_image=not cached):
                return
            batch.add(self._admit(sequence), computes_image=not cached)
            if not cached:
                self._manager.planned(sequence)

    def _long_prompt(self, first: _Admitted, *, others_decode: bool) -> Plan:
        """The whole in a launch of its own, or a pass of it while others decode."""
        size = self._limits.long_tokens
        if others_decode and 0 < size < first.num_prompt_left:
            return self._part(first, (), size)
        return Plan(LaunchKind.PREFILL, (first.schedule(first.num_left),))

    def _shared_part(self, first: _Admitted, decodes: tuple[ScheduledSequence, ...]) -> Plan | None:
        """A part beside the decodes, or in turns with them if they are too many; None: the rest is
        one launch.
        """
        if not decodes:
            return None
        beside = decodes if len(decodes) < self._limits.sampled else ()
        num_tokens = shared_part(
            first.num_left,
            len(beside),
            self._limits,
            others_wait=bool(self._queue),
            may_join=bool(self._queue) or _computes_image(first),
        )
        return self._part(first, beside, num_tokens) if num_tokens > first.num_bos else None

    def _part(
        self, first: _Admitted, decodes: tuple[ScheduledSequence, ...], num_tokens: int
    ) -> Plan:
        """The rest is planned next."""
        row = first.schedule(num_tokens)
        first.work, first.position = NO_PREFILL_WORK, first.position + row.num_tokens
        self._begun = first
        return Plan(LaunchKind.PREFILL, (*decodes, row), len(decodes), has_part=True)

    def _max_images(
        self, first: _Admitted, decodes: tuple[ScheduledSequence, ...], streaming: bool
    ) -> int:
        if streaming or self._limits.images == 1:
            return 0
        if _computes_image(first) and not first.sequence.num_crops:
            return 0  # the encoder does not support it
        enough_wait = len(self._queue) >= self._limits.min_queue_length
        all_short = all(row.sequence.progress.num_launched < _SHORT_ANSWER for row in decodes)
        return self._limits.images if enough_wait and all_short else 0

    def _next(self) -> Sequence | None:
        if self._manager.rows_free == 0:
            return None
        return self._queue.first(self._manager.can_admit, self._manager.lacks_adapter_slot)

    def _admit_next(self) -> _Admitted | None:
        sequence = self._next()
        self._found_none = sequence is None
        return None if sequence is None else self._admit(sequence)

    def _admit(self, sequence: Sequence) -> _Admitted:
        self._queue.take(sequence)
        work = self._manager.admit(sequence)
        position = max(sequence.pages.cached_length, sequence.prefix_length)
        return _Admitted(sequence, work, position)

    def _encode(self, admitted: _Admitted, max_crops: int) -> Plan:
        sequence, work = admitted.sequence, admitted.work
        self._begun = admitted
        stop = min(work.first_crop + max_crops, sequence.num_crops)
        admitted.work = dataclasses.replace(work, first_crop=stop)
        part = dataclasses.replace(work, stop_crop=stop)
        row = ScheduledSequence(sequence, sequence.prefix_length, 0, part)
        return Plan(LaunchKind.ENCODE, (row,))


def _is_split(admitted: _Admitted, max_crops: int) -> bool:
    work = admitted.work
    if max_crops == 0 or not work.compute_pages:
        return False
    return (work.first_crop or max_crops) < admitted.sequence.num_crops


def _computes_image(admitted: _Admitted) -> bool:
    return admitted.sequence.image_prefix_length > 0 and bool(admitted.work.compute_pages)


def _most_tokens(sequence: Sequence) -> int:
    """Return the maximum tokens its prompt computes if at most the image is cached."""
    return sequence.length - sequence.image_prefix_length
