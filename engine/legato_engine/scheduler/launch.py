"""What goes through the pipeline: a frozen batch, tagged with its kind, and the phase it is in."""

from __future__ import annotations

import dataclasses
import enum

from legato_engine.kv_cache.prefix_work import NO_PREFIX_WORK, PrefixWork
from legato_engine.sequence import Sequence


class LaunchKind(enum.StrEnum):
    """What a launch runs; the pipeline treats both alike."""

    PREFILL = "prefill"
    DECODE = "decode"


class Phase(enum.StrEnum):
    """A launch's life, in order. FORWARD: forward enqueued, sampling not yet. SAMPLED: sampling
    and the copy back are enqueued too. COMMITTED: read back, its slot is free.
    """

    FORWARD = "forward"
    SAMPLED = "sampled"
    COMMITTED = "committed"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part in a launch.

    `position` is the absolute position of the first private input token of this launch: for decode
    the single token fed (sampled by an earlier launch, read on the device), for prefill the first
    prompt token after the prefix. The token sampled sits at `position + num_tokens`.
    """

    sequence: Sequence
    position: int
    num_tokens: int = 1
    prefix: PrefixWork = NO_PREFIX_WORK


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A batch decided before anything runs; compared with `==` in tests."""

    kind: LaunchKind
    rows: tuple[Row, ...]

    @property
    def constrained(self) -> bool:
        """Whether sampling must wait for the commit of the previous launch.

        A prefill's first constraint is known from the start, so it never waits.
        """
        return self.kind is LaunchKind.DECODE and any(
            r.sequence.task.constrained for r in self.rows
        )


@dataclasses.dataclass(slots=True, eq=False)
class Launch:
    """A plan in flight in one of the two slots."""

    launch_id: int
    slot: int
    plan: Plan
    phase: Phase = Phase.FORWARD
