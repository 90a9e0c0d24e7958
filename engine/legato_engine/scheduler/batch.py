"""Plans and launches: one batch from planning to commit."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from legato_engine.kv_cache.manager import NO_PREFILL_WORK, PrefillWork
from legato_engine.sequence import Sequence


class LaunchKind(enum.StrEnum):
    """Kind of a launch."""

    ENCODE = "encode"  # pieces of one sequence's images, before the PREFILL that reads them
    PREFILL = "prefill"
    DECODE = "decode"
    REFINE = "refine"  # for a finished request; names no sequence


class ScheduledSequence(NamedTuple):
    """Part of one sequence in a launch; a tuple because every decode creates one per sequence.

    Its input is `[position, position + num_tokens)`; the sampled token follows. A prefill starts
    after the cached positions, a decode with the newest token, which it reads on the device, and
    continues with `forced` tokens, which a grammar makes certain. An encode has no input.

    A decode also verifies draft tokens: the device chooses how many, up to `num_drafts`. While
    earlier ones, or a loop, are in flight, only the device knows where it starts, in
    `[position, position + slack]`.
    """

    sequence: Sequence
    position: int
    num_tokens: int = 1
    work: PrefillWork = NO_PREFILL_WORK
    num_drafts: int = 0
    slack: int = 0
    forced: tuple[int, ...] = ()

    def with_forced(self, forced: tuple[int, ...]) -> ScheduledSequence:
        return self._replace(num_tokens=1 + len(forced), forced=forced)

    @property
    def end(self) -> int:
        """Return the exclusive end of the positions that it may write; each needs a page."""
        return self.end_after(1)

    def end_after(self, num_steps: int) -> int:
        """Return the end in a loop of up to `num_steps` steps, at most the sequence's maximum."""
        end = self.position + self.slack + self.num_tokens + self.num_drafts + num_steps - 1
        return min(end, self.sequence.max_length)

    def reach(self, num_steps: int) -> int:
        """Return the end of the positions that a loop with drafts may write after its first step.

        That is the number of tokens counted as in flight, from the first possible start.
        """
        end = self.position + self.num_tokens + self.num_drafts + num_steps - 1
        return min(end, self.sequence.max_length)

    @property
    def encodes(self) -> bool:
        return bool(self.work.compute_pages) and self.sequence.num_crops > 0

    def new_pages(self, page_size: int, num_steps: int = 1) -> range:
        """Return the indices into `pages.ids` that no earlier launch can have used."""
        start, end = self.position + self.slack, self.end_after(num_steps)
        return range(-(-start // page_size), -(-end // page_size))


@dataclasses.dataclass(slots=True, eq=False)
class Refinement:
    """Input of a REFINE launch, opaque here, and its result.

    The runner sets `result`; then `done` is called on the scheduler's thread.
    """

    inputs: Any
    done: Callable[[Refinement], None]
    result: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The batch of one launch.

    In a prefill, `num_mixed_decodes` decodes come first, then sequences whose image is computed,
    then the others. With `has_partial_prefill`, the last row is a chunk of a prompt, which later
    launches continue. A REFINE plan has no rows. `under_pressure`: the pool of KV pages is nearly
    full.

    A loop is a decode launch of up to `num_steps` (> 1) steps; the host streams their tokens. It
    has positions for `num_steps` tokens per row. `after` holds, per row, its index in the tokens of
    the previous launch, or -1: the device advances the row's constraint by that token. () if it
    cannot.

    `behind` holds the decodes' indices in the loop in flight before them; a row that ended in that
    loop is padding. With speculation the device knows each row's position.
    """

    kind: LaunchKind
    rows: tuple[ScheduledSequence, ...]
    num_mixed_decodes: int = 0
    refinement: Refinement | None = None
    under_pressure: bool = False
    num_steps: int = 1
    after: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    has_partial_prefill: bool = False

    @property
    def is_loop(self) -> bool:
        return self.num_steps > 1

    @property
    def decodes(self) -> tuple[ScheduledSequence, ...]:
        return self.rows if self.kind is LaunchKind.DECODE else self.rows[: self.num_mixed_decodes]

    @property
    def prefills(self) -> tuple[ScheduledSequence, ...]:
        return self.rows[self.num_mixed_decodes :] if self.kind is LaunchKind.PREFILL else ()

    @property
    def sampled_rows(self) -> tuple[ScheduledSequence, ...]:
        return () if self.kind is LaunchKind.ENCODE else self.rows

    @property
    def counted_rows(self) -> tuple[ScheduledSequence, ...]:
        """Return the rows whose sampled token is kept (not a partial prefill)."""
        return self.rows[:-1] if self.has_partial_prefill else self.sampled_rows

    @property
    def constrained(self) -> bool:
        """Return whether sampling must wait for the previous commit; a prefill's never does."""
        constrained = [row.sequence.task.constrained for row in self.decodes]
        return not self.after and any(constrained)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a shared prefill launch. With one prompt nothing is shared, not even decodes.

    Each computed image but the first adds one to the allowed prompts. A launch of more tokens than
    `pass_tokens` makes several passes over the weights; 0: its time grows with every token. A
    prompt that computes more tokens than `chunk_above` is prefilled in chunks of
    `long_chunk_tokens`, which decodes cannot join. An encode for a visual prompt takes pieces of up
    to `image_tokens`.
    """

    prompts: int = 1
    tokens: int = 0  # of input
    sampled: int = 0  # sequences
    images: int = 1  # to compute, while at least `min_queue_length` sequences wait
    min_queue_length: int = 0
    pass_tokens: int = 0
    chunk_above: int = 0
    long_chunk_tokens: int = 0  # 0: it is not chunked
    image_tokens: int = 0  # 0: images are encoded in the prefill

    def is_long(self, sequence: Sequence) -> bool:
        """Return whether an admitted sequence's prompt computes more than `chunk_above` tokens."""
        return 0 < self.chunk_above < sequence.num_prompt_computed


ALONE = BatchLimits()
"""Limits that give every prompt its own launch."""


@dataclasses.dataclass(slots=True, eq=False)
class Launch:
    """A plan in flight; `depth` is the pipeline's when it was launched."""

    launch_id: int
    slot: int
    plan: Plan
    depth: int = 2
    is_sampled: bool = False  # sampling and the copy are enqueued


# ---------------------------------------------------------------- step record


@dataclasses.dataclass(slots=True, eq=False)
class StepRecord:
    """The host's work on a launch, in `Clock.perf_ns` nanoseconds."""

    launch: Launch
    plan_start: int
    plan_end: int
    launch_end: int = 0
    sample_start: int = 0
    mask_end: int = 0  # 0: no row has a grammar
    sample_end: int = 0
    wait_start: int = 0
    wait_end: int = 0
    commit_end: int = 0
    num_steps_read: int = 0  # of a loop
    zombies: int = 0  # rows whose sequence had ended before this commit
    tokens: int = 0  # committed, of the other rows
    forced: int = 0  # of `tokens`, those that grammars forced beside a sampled one
    drafted: int = 0  # draft tokens
    accepted: int = 0  # draft tokens, including those after a sequence's end
    rejected: int = 0  # draft tokens that ended a block; `accepted + rejected` were tried
    blocks: list[int] = dataclasses.field(default_factory=list)  # draft tokens per row and step
