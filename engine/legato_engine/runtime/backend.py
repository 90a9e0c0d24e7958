"""The device work of a launch, apart from staging, events and copies."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence


class Backend(Protocol):
    """Enqueues the work of each kind of launch on the compute stream.

    `TorchBackend` runs a model's torch operations, `KernelBackend` its CUDA kernels. `prefill` and
    `encode` stage their own inputs; the other methods read what the runner has staged in the slot.
    """

    buckets: tuple[int, ...]  # batch sizes in tokens, ascending
    limits: BatchLimits  # of a prefill that sequences share
    encodes_images: bool  # takes uncropped images; otherwise the frontend crops every image

    def warm_up(self) -> None:
        """Capture every shape, or run it once, so that no launch is the first of its shape."""
        ...

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        """Enqueue one forward over the staged tokens, with adapters up to `rank` (0: none).

        `num_rows` counts the sequences that the tokens belong to; it affects only speed.
        """
        ...

    def grow(self, slot: int) -> None:
        """Add the staged pages to the page table, before the forward that writes to them."""
        ...

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """Choose a token per row.

        `sampled`: some row is not greedy. `payload`: some row has a task with values.
        """
        ...

    def logprobs(self, slot: int, bucket: int, *, payload: bool) -> None:
        """Compute the log-probabilities of what `sample` chose, after it and with its `payload`."""
        ...

    def prefill(
        self,
        slot: int,
        prompts: Many[ScheduledSequence],
        decodes: Many[ScheduledSequence],
        rank: int,
    ) -> None:
        """Enqueue prompts, and decodes that share the launch, with adapters up to `rank`.

        The slot's first rows become the outputs of the decodes, followed by those of each prompt's
        last position. `limits` bounds a launch of more than one prompt, or with any decode.
        """
        ...

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        """Encode the crops of the row's image that its prefill work names."""
        ...
