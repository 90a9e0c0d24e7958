"""Interfaces of the scheduler to its clock, its runner and what observes it."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import abc
from collections.abc import Callable
from typing import Protocol

from legato_engine.scheduler.batch import Launch, StepRecord
from legato_engine.sequence import RowTokens


class Clock:
    """The host's clocks; static methods avoid a Python frame, as a step reads them eight times.

    `now`: seconds on the clock of `Request.deadline`. `perf_ns`: nanoseconds on the clock of device
    events.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)
    perf_ns: Callable[[], int] = staticmethod(time.perf_counter_ns)


# ---------------------------------------------------------------- runner


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Device times of a launch, on the `time.perf_counter_ns` clock."""

    forward_start: int
    forward_end: int
    sample_start: int
    sample_end: int
    copy_end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A committed launch."""

    record: StepRecord
    times: LaunchTimes


Pause = Callable[[float], bool]
"""Sleep for the given seconds; return True to end the surrounding wait early.

It does so when the caller has something else to do.
"""


def sleep(seconds: float) -> bool:
    """Sleep without interruption, as a `Pause`."""
    time.sleep(seconds)
    return False


class LoopPoll(enum.Enum):
    """Result of polling a loop that returned no tokens."""

    PENDING = enum.auto()
    """A pause was cut short."""

    FINISHED = enum.auto()
    """The loop has ended, and all of its steps were returned."""


class Runner(Protocol):
    """Executor of launches on the device.

    Each launch gets one call of `forward`, `sample` and `collect`, in this order, and owns its
    slot's buffers in between; before `sample`, one of `mask` if a row has a grammar. Only `collect`
    blocks. `Sequence.inputs` is read in `forward`.
    """

    def forward(self, launch: Launch) -> None:
        """Stage the rows and enqueue the forward pass."""

    def mask(self, launch: Launch, constraints: abc.Sequence[int]) -> abc.Sequence[int]:
        """Make masks of the rows' grammars; return the constraints to sample with."""

    def sample(self, launch: Launch, constraints: abc.Sequence[int]) -> None:
        """Enqueue sampling, then the copy to the host on the copy stream.

        Encodes and refinements have no constraints and only record events.
        """

    def collect(self, launch: Launch) -> list[RowTokens] | None:
        """Wait for the copy; set a refinement's result.

        Return None for decodes that must be rolled back: they ran behind a loop that aborted, so
        their positions are unknown.
        """

    def times(self, launch: Launch) -> LaunchTimes:
        """Return the device times; valid after `collect`, until the slot's next `forward`."""


class LoopRunner(Protocol):
    """Runner that can also run loops; `collect` returns no tokens of a loop."""

    def poll_loop(self, launch: Launch, pause: Pause) -> list[RowTokens] | LoopPoll:
        """Poll for the next step of a loop, pausing between polls.

        A loop may abort before all of its steps were run, even before the first.
        """

    def break_even_steps(self, launch: Launch) -> int:
        """Return the steps needed to amortise the loop's overhead."""

    def stop_loop(self, launch: Launch) -> None:
        """Stop a loop after its current step."""
