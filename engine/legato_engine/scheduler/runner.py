"""The scheduler's interface to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from legato_engine.scheduler.launch import Launch
from legato_engine.tasks import SampledToken


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchTimes:
    """When the parts of a launch ran on the device, on the `time.perf_counter_ns` clock."""

    forward_start: int
    forward_end: int
    sample_start: int
    sample_end: int
    copy_end: int


class RowTokens(NamedTuple):
    """What a launch returned for one sequence: accepted draft tokens, then the model's next token.

    Empty for a zombie whose last token came with an earlier launch.
    """

    tokens: tuple[SampledToken, ...]
    num_drafted: int = 0  # at most the row's `num_drafts`; a proposer may have no guess


class Runner(Protocol):
    """Runs launches on the device; implemented by `runtime.model_runner.ModelRunner`.

    Each launch gets one call of `forward`, `sample` and `collect`, in this order, and owns its
    slot's buffers in between. Only `collect` blocks. `Sequence.inputs` is read in `forward`.
    """

    def forward(self, launch: Launch) -> None:
        """Stage the rows into the slot and enqueue the forward pass on the compute stream."""
        ...

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Enqueue sampling on the compute stream, then the copy to the host on the copy stream.

        There is one constraint per row; encodes and refinements have none and only record events.
        """
        ...

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Wait for the copy and return the tokens of each row; set a refinement's answer."""
        ...

    def times(self, launch: Launch) -> LaunchTimes:
        """Return the device times of a collected launch, until the slot's next `forward`."""
        ...
