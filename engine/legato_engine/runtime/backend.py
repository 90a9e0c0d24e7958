"""The device work of launches."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from legato_engine.kernels.resident_launch import ResidentOffer
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.preparation import Changes
from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence
from legato_engine.speculative.block_policy import BlockPolicy


class Needs(NamedTuple):
    """What some row of a launch needs of its sampling."""

    sampled: bool  # it is not greedy
    payload: bool  # its task has values
    logprobs: bool
    alternatives: bool = False  # to its tokens; never in a loop


class Backend(Protocol):
    """Enqueues the work of launches on the compute stream.

    `prefill` and `encode` stage their own inputs, and `prefill` uploads all of the launch; the
    other methods read what the runner has uploaded.
    """

    buckets: tuple[int, ...]  # tokens, ascending
    limits: BatchLimits  # of a prefill that sequences share
    encodes_images: bool  # takes uncropped images

    def warm_up(self) -> None:
        """Capture or run every shape, so that no launch is the first of its shape."""
        ...

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        """Enqueue a forward with adapters up to `rank` (0: none); `num_rows` affects speed only."""
        ...

    def prepare(self, slot: int, changes: Changes) -> None:
        """Apply what a decode changes, before its forward."""
        ...

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """As `Needs` says."""
        ...

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        """The work of a step, in order, to be repeated at fixed addresses."""
        ...

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        """Offer launches of several steps in one kernel, whose rows draft by a `policy` if there is
        one, or say why there are none.
        """
        ...

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        """Compute them for what `sample` chose with this `payload`, and `alternatives` to it."""
        ...

    def prefill(
        self,
        slot: int,
        prompts: Many[ScheduledSequence],
        decodes: Many[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        """Enqueue prompts, and decodes that share the launch, after its `changes`.

        The slot's first rows become the outputs of the decodes, then of each prompt's last
        position. `limits` bounds a launch of more than one prompt, or with any decode.
        """
        ...

    def encode(self, slot: int, row: ScheduledSequence) -> None: ...
