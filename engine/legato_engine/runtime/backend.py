"""What a launch runs on the device, apart from staging, events and copies."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.scheduler.launch import BatchLimits, Row


class Backend(Protocol):
    """The device work of every kind of launch, enqueued on the compute stream.

    `torch_program` runs a model's own operations, `fused_program` its kernels. Steps read what the
    runner has staged in their slot; a prefill and an encode stage their own.
    """

    buckets: tuple[int, ...]  # the batch sizes that exist, rising
    limits: BatchLimits  # of a launch that prompts share
    encodes_images: bool  # those left whole, too; else the frontend has to cut every picture

    def warm_up(self) -> None:
        """Capture (or once run) every shape, so that no launch pays for it later."""
        ...

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        """One forward over the staged tokens; adapters of at most `rank`, none if that is 0.

        `num_rows` is how many rows the tokens are of: nothing but speed depends on it.
        """
        ...

    def grow(self, slot: int) -> None:
        """Add pages to rows of the table, ahead of the forward that writes to them."""
        ...

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """Choose a token per row; `sampled` if any row is not greedy, `payload` if any has one."""
        ...

    def logprobs(self, slot: int, bucket: int, *, payload: bool) -> None:
        """Behind `sample`, with its `payload`: how likely what it chose was."""
        ...

    def prefill(self, slot: int, prompts: Many[Row], decodes: Many[Row], rank: int) -> None:
        """Prompts of some sequences, and others that decode along with them.

        Of the decodes and then of the prompts' last positions the outputs become the slot's first
        rows. More than one prompt, or any decode, only within `limits`; `rank` is the decodes'.
        """
        ...

    def encode(self, slot: int, row: Row) -> None:
        """The crops of a row's picture that its prefix work names."""
        ...
