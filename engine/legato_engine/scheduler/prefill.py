"""Prefill planning with chunked prefill.

Decodes run in the last pass over the weights of their launch and cannot share one with a long
prompt, so a launch with many tokens makes them wait.
"""

from __future__ import annotations

import dataclasses
import itertools

from legato_engine.kv_cache.manager import NO_PREFILL_WORK, KVCacheManager, PrefillWork
from legato_engine.scheduler.batch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence

_MAX_EXTRA_PASSES = 4 / 3
"""Chunked passes / unchunked passes, at most."""


def chunk_size(
    num_tokens: int, num_decodes: int, limits: BatchLimits, *, others_wait: bool, may_join: bool
) -> int:
    """Return the tokens of a prompt's next chunk, or 0 to launch all `num_tokens`.

    `num_decodes` decodes share the launch; 0: all decodes run in a launch of their own after it.

    Chunks beside decodes have the smallest size that adds few passes over the weights, or none
    while other prompts wait, because extra passes delay them. If every size adds more, a prompt too
    long to share a launch gets the largest chunks, and any other stays whole; it also stays whole
    if another prompt may join.
    """
    size = limits.pass_tokens
    fits = num_tokens + num_decodes <= limits.tokens
    if not size or num_tokens + num_decodes <= size or (fits and (may_join or not num_decodes)):
        return 0
    largest = limits.tokens // size * size - num_decodes
    if not num_decodes:
        return largest
    max_passes: float = -(-(num_tokens + num_decodes if fits else num_tokens) // size)
    max_passes *= 1 if others_wait else _MAX_EXTRA_PASSES
    for room in range(size - num_decodes, min(largest + 1, num_tokens), size):
        if _num_passes(num_tokens, room, num_decodes, size) <= max_passes:
            return room
    return 0 if fits else largest


def _num_passes(num_tokens: int, room: int, num_decodes: int, size: int) -> int:
    """Count the passes of `size` tokens for a prompt chunked by `room` tokens beside decodes."""
    num_chunks, rest = divmod(num_tokens, room)
    last = -(-(rest + num_decodes) // size) if rest else 0
    return num_chunks * ((room + num_decodes) // size) + last


# ---------------------------------------------------------------- prefill planner

_SHORT_ANSWER = 8
"""Tokens; launches with several images may delay shorter answers only."""


@dataclasses.dataclass(slots=True, eq=False)
class _Admitted:
    """An admitted sequence whose prompt is computed up to `position`.

    After a preemption its answer is computed, too.
    """

    sequence: Sequence
    work: PrefillWork
    position: int

    @property
    def num_left(self) -> int:
        """Return the tokens to compute, including BOS."""
        return self.sequence.length - self.position + self.num_bos

    @property
    def num_bos(self) -> int:
        """Return 1 if BOS must be computed, which is not a token of the prompt."""
        return int(bool(self.work.compute_pages) and not self.sequence.image_prefix_length)

    def needed_pieces(self, end: int) -> range:
        """Return the pieces of images that positions up to `end` read, encoded ones included."""
        visual = self.sequence.inputs.visual
        if visual is not None:
            return visual.prompt.pieces_of(self.position, end)
        return range(self.sequence.num_crops if self.work.compute_pages else 0)

    def schedule(self, num_tokens: int) -> ScheduledSequence:
        """Schedule the next `num_tokens` of `num_left`."""
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
        if sequence.inputs.visual is not None:
            return False  # its images may be too many for one launch
        num_images = len(self.images) + computes_image
        num_prompts = len(self.others) + (not computes_image) + min(1, num_images)
        if num_prompts > self.limits.prompts or not self.has_room(_max_tokens(sequence)):
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
    """Planner of prefills: admits sequences that fit, in the order of the `WaitingQueue`.

    No other sequence is planned between the encodes of an image and its prefill, because the device
    has one feature buffer, nor between the chunks of a prompt. A prompt with many images is an
    exception: every other time a prompt of one chunk passes it, with images or without. So the
    device holds features for one chunk of each.

    Chunked prefill: decodes wait while a prompt passes over the weights, so a prompt of several
    passes may be split into chunks, one per launch. The images of a chunk are encoded before it. A
    visual prompt is split even without decodes, because it may take long enough for others to
    arrive, or for its own deadline.

    Short prompts share a launch within `limits`. An image to compute comes first in its launch, so
    that no earlier request waits for it.

    Several images share a launch only while many requests wait: each delays the whole launch but
    saves queued requests part of a pass over the weights. An additional image never joins the
    decodes of a long answer, because it would delay each of their tokens.
    """

    def __init__(
        self, manager: KVCacheManager, queue: WaitingQueue[Sequence], limits: BatchLimits = ALONE
    ) -> None:
        self._manager = manager
        self._limits = limits
        self._queue = queue
        self._partial: _Admitted | None = None  # its image or prompt is partly computed
        self._was_passed = False  # it waited for the latest launch of another
        self._nothing_fits = False  # at the last admission

    def __len__(self) -> int:
        """Return the number of waiting sequences, without a partly computed one."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._partial is not None

    @property
    def expects_plan(self) -> bool:
        """Return whether `plan` will probably return a plan; much cheaper than planning."""
        may_admit = bool(self._queue) and self._manager.rows.num_free > 0 and not self._nothing_fits
        return self._partial is not None or may_admit

    def add(self, sequence: Sequence) -> None:
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence before all of its prefill is planned; the caller releases it."""
        if self._partial is not None and self._partial.sequence is sequence:
            self._partial = None
        else:
            self._queue.remove(sequence)

    def plan(
        self,
        max_crops: int = 0,
        decodes: tuple[ScheduledSequence, ...] = (),
        *,
        streaming: bool = False,
    ) -> Plan | None:
        """Admit sequences and plan their prefill, a chunk of one, or an encode of part of an image.

        An admission takes a row and pages, so the plan must be launched.

        Args:
            max_crops: maximum crops per encode; 0 leaves the rest of the image to the prefill. A
                visual prompt has a limit of its own, `image_tokens`.
            decodes: join the launch, all or none, if they fit with the first prompt.
            streaming: a decode streams; then at most one image is computed.
        """
        partial = self._partial
        passing = self._admit_passing(partial) if partial is not None else None
        self._was_passed = passing is not None
        first = passing or partial or self._admit_next()
        if first is None:
            return None
        is_split = bool(decodes) or first.sequence.inputs.visual is not None
        long_chunk = self._long_chunk(first) if is_split else 0
        encode = self._encode(first, max_crops, long_chunk)
        if encode is not None:
            return encode
        self._partial = None if passing is None else partial
        self._manager.mark_planned(first.sequence)
        if long_chunk:
            return self._plan_chunk(first, (), long_chunk)
        if self._limits.is_long(first.sequence):
            return Plan(LaunchKind.PREFILL, (first.schedule(first.num_left),))
        if (chunk := self._plan_shared_chunk(first, decodes)) is not None:
            return chunk
        batch = _Batch(self._limits, decodes, self._max_images(first, decodes, streaming))
        if not batch.has_room(first.num_left):
            batch = dataclasses.replace(batch, decodes=())
        batch.add(first, computes_image=_computes_image(first))
        self._fill(batch)
        return batch.plan()

    def _fill(self, batch: _Batch) -> None:
        while self._limits.prompts > 1 and (sequence := self._peek()) is not None:
            cached = self._manager.has_image_prefix(sequence)
            if not batch.accepts(sequence, computes_image=not cached):
                return
            batch.add(self._admit(sequence), computes_image=not cached)
            if not cached:
                self._manager.mark_planned(sequence)

    def _long_chunk(self, first: _Admitted) -> int:
        """Return the tokens of a long prompt's next chunk, 0 for its last or a short prompt."""
        size = self._limits.long_chunk_tokens
        num_prompt_left = first.num_left - first.sequence.num_committed
        is_chunked = self._limits.is_long(first.sequence) and first.num_bos < size < num_prompt_left
        return size if is_chunked else 0

    def _plan_shared_chunk(
        self, first: _Admitted, decodes: tuple[ScheduledSequence, ...]
    ) -> Plan | None:
        """Plan a chunk beside the decodes, or without them if they are too many.

        Return None if the rest of the prompt is one launch.
        """
        if not decodes:
            return None
        shared = decodes if len(decodes) < self._limits.sampled else ()
        num_tokens = chunk_size(
            first.num_left,
            len(shared),
            self._limits,
            others_wait=bool(self._queue),
            may_join=bool(self._queue) or _computes_image(first),
        )
        return self._plan_chunk(first, shared, num_tokens) if num_tokens > first.num_bos else None

    def _plan_chunk(
        self, first: _Admitted, decodes: tuple[ScheduledSequence, ...], num_tokens: int
    ) -> Plan:
        """Plan a chunk; the rest of the prompt is planned next."""
        row = first.schedule(num_tokens)
        end, encoded = first.position + row.num_tokens, 0
        if first.sequence.inputs.visual is not None:
            encoded = max(first.work.first_piece, first.needed_pieces(end).stop)
        first.work = dataclasses.replace(NO_PREFILL_WORK, first_piece=encoded)
        first.position = end
        self._partial = first
        return Plan(LaunchKind.PREFILL, (*decodes, row), len(decodes), has_partial_prefill=True)

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

    def _peek(self) -> Sequence | None:
        if self._manager.rows.num_free == 0:
            return None
        return self._queue.first(self._manager.can_admit, self._manager.lacks_adapter_slot)

    def _admit_next(self) -> _Admitted | None:
        sequence = self._peek()
        self._nothing_fits = sequence is None
        return None if sequence is None else self._admit(sequence)

    def _admit_passing(self, partial: _Admitted) -> _Admitted | None:
        """Admit a prompt of one launch that passes a partly computed visual prompt."""
        limit = self._limits.image_tokens
        if partial.sequence.inputs.visual is None or self._was_passed:
            return None
        sequence = self._peek()
        is_short = sequence is not None and sequence.length <= limit
        if sequence is None or not is_short or sequence.image_prefix_length:
            return None
        return self._admit(sequence)

    def _admit(self, sequence: Sequence) -> _Admitted:
        self._queue.dequeue(sequence)
        work = self._manager.admit(sequence)
        position = max(sequence.pages.cached_length, sequence.prefix_length)
        return _Admitted(sequence, work, position)

    def _encode(self, first: _Admitted, max_crops: int, long_chunk: int) -> Plan | None:
        """Plan an encode of pieces that the next chunk (0: the whole prompt) needs.

        Return None if they are encoded, or few enough for the chunk's own launch.
        """
        sequence, work = first.sequence, first.work
        visual = sequence.inputs.visual
        limit = max_crops if visual is None else self._limits.image_tokens
        needed = first.needed_pieces(first.position + long_chunk if long_chunk else sequence.length)
        left = range(max(work.first_piece, needed.start), needed.stop)
        if not limit or not left:
            return None
        costs = [1 if visual is None else visual.prompt.cost(piece) for piece in left]
        if left == needed and sum(costs) <= limit:
            return None
        # At least one, which cannot be split.
        count = max(1, sum(total <= limit for total in itertools.accumulate(costs)))
        stop = left.start + count
        self._partial = first
        first.work = dataclasses.replace(work, first_piece=stop)
        part = dataclasses.replace(work, first_piece=left.start, stop_piece=stop)
        return Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, first.position, 0, part),))


def _computes_image(admitted: _Admitted) -> bool:
    return admitted.sequence.image_prefix_length > 0 and bool(admitted.work.compute_pages)


def _max_tokens(sequence: Sequence) -> int:
    """Return the maximum tokens its prompt computes if at most the image is cached."""
    return sequence.length - sequence.image_prefix_length
