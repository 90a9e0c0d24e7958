"""The scheduler's only view of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from legato_engine.scheduler.launch import Launch
from legato_engine.tasks import SampledToken


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchTimes:
    """When a launch's parts ran on the device, `time.perf_counter_ns` clock."""

    forward_start: int
    forward_end: int
    sample_start: int
    sample_end: int
    copy_end: int


class RowTokens(NamedTuple):
    """What one launch gave one row: the accepted tokens, then the model's own next.

    No token at all where an earlier launch has given the row its last one: a zombie. `num_drafted`
    is at most the row's `num_drafts`: a proposer may have no guess.
    """

    tokens: tuple[SampledToken, ...]
    num_drafted: int = 0


class Runner(Protocol):
    """Runs launches; `runtime.model_runner.ModelRunner` does it for real.

    Calls for one launch come in this order, once each: `forward`, `sample`, `collect`. Between
    `forward` and the end of `collect` the launch owns the buffers of its slot. Nothing here blocks
    but `collect`. An encode and the prefill behind it read the sequence's `pixels` in `forward`.
    """

    def forward(self, launch: Launch) -> None:
        """Stage the rows into the slot and enqueue the forward pass on the compute stream."""
        ...

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Enqueue sampling under one constraint per row, then the copy back on the copy stream.

        An encode or a refinement samples nothing: no constraints, only its events are recorded.
        """
        ...

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Wait for the copy and read every row's tokens, none of an encode's; or the answer to a
        refinement.

        After it returns the slot is free.
        """
        ...

    def times(self, launch: Launch) -> LaunchTimes:
        """Device times of a collected launch, until its slot's next `forward`."""
        ...
