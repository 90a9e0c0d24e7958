"""What goes through the pipeline: a frozen batch, tagged with its kind, and the phase it is in."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from legato_engine.kv_cache.prefill_work import NO_PREFIX_WORK, PrefillWork
from legato_engine.sequence import Sequence


class LaunchKind(enum.StrEnum):
    """What a launch runs; the pipeline treats all alike.

    ENCODE runs the vision tower over some crops of one row's picture and samples nothing. Its
    features wait in the device's only feature buffer for that row's PREFILL; until then no other
    sequence is encoded or prefilled. REFINE is no sequence's any more: it makes something better
    of what one has said, and samples nothing either.
    """

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    REFINE = "refine"


class Phase(enum.StrEnum):
    """A launch's life, in order. FORWARD: forward enqueued, sampling not yet. SAMPLED: sampling
    and the copy back are enqueued too. COMMITTED: read back, its slot is free.
    """

    FORWARD = "forward"
    SAMPLED = "sampled"
    COMMITTED = "committed"


class Row(NamedTuple):
    """One sequence's part in a launch; a tuple, as every decode makes one for each of its rows.

    `position` is the absolute position of the first private input token of this launch: for decode
    the single token fed (sampled by an earlier launch, read on the device), for prefill the first
    after the prefix that was not found. A decode that feeds the first position of a page is the
    first launch to name that page. The token sampled sits at `position + num_tokens`. An encode
    feeds no token: its `num_tokens` is 0, and its `prefix` names the crops.

    A decode may feed `num_drafts` proposed tokens behind its own. While launches in flight have
    proposed too, only the device knows where it stands: at `position`, or up to `slack` behind it.
    """

    sequence: Sequence
    position: int
    num_tokens: int = 1
    prefix: PrefillWork = NO_PREFIX_WORK
    num_drafts: int = 0
    slack: int = 0

    @property
    def end(self) -> int:
        """One past the last position that this launch may write: those before it need pages."""
        end = self.position + self.slack + self.num_tokens + self.num_drafts
        return min(end, self.sequence.max_length)

    @property
    def encodes(self) -> bool:
        """Whether it computes a picture, or what is left of it, that an encoder takes."""
        return bool(self.prefix.compute_pages) and self.sequence.num_crops > 0

    def new_pages(self, page_size: int) -> range:
        """Places in the sequence's table of the pages that this decode is the first to name.

        Launches before it have named those of all positions before its own farthest start.
        """
        start = self.position + self.slack
        return range(-(-start // page_size), -(-self.end // page_size))


@dataclasses.dataclass(slots=True, eq=False)
class Refinement:
    """What a REFINE launch works on, opaque here; the runner fills `answer` when it is collected.

    `done` is then called with it, on the scheduler's thread.
    """

    given: Any
    done: Callable[[Refinement], None]
    answer: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A batch decided before anything runs; compared with `==` in tests.

    The first `num_mixed_decodes` rows of a prefill are decodes that share its launch; then come
    those whose image is to be computed. A REFINE launch has a `refinement` and no rows.
    """

    kind: LaunchKind
    rows: tuple[Row, ...]
    num_mixed_decodes: int = 0
    refinement: Refinement | None = None

    @property
    def decodes(self) -> tuple[Row, ...]:
        """The rows that feed their newest token."""
        return self.rows if self.kind is LaunchKind.DECODE else self.rows[: self.num_mixed_decodes]

    @property
    def prefills(self) -> tuple[Row, ...]:
        """The rows that feed what is known of them."""
        return self.rows[self.num_mixed_decodes :] if self.kind is LaunchKind.PREFILL else ()

    @property
    def sampled_rows(self) -> tuple[Row, ...]:
        """The rows that get a token: all, but none of an encode's."""
        return () if self.kind is LaunchKind.ENCODE else self.rows

    @property
    def constrained(self) -> bool:
        """Whether sampling must wait for the commit of the previous launch.

        A prefill's is known when it is planned, as nothing of its sequence is in flight.
        """
        return any(row.sequence.task.constrained for row in self.decodes)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLimits:
    """What fits a prefill that is shared: `prompts`, and `tokens` fed by all its rows, of
    which `sampled` are sampled from, one a row.

    With one prompt a launch, nothing is shared: not with a decode either.

    Up to `pictures` may be computed in a launch while at least `crowd` sequences wait behind it;
    each but the first is a prompt more than `prompts`.
    """

    prompts: int = 1
    tokens: int = 0
    sampled: int = 0
    pictures: int = 1
    crowd: int = 0


ALONE = BatchLimits()
"""Every prompt has a launch of its own."""


@dataclasses.dataclass(slots=True, eq=False)
class Launch:
    """A plan in flight in one of the two slots."""

    launch_id: int
    slot: int
    plan: Plan
    phase: Phase = Phase.FORWARD
