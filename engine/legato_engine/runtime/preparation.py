"""What a launch changes in the rows' state before its forward, as one captured work."""

from __future__ import annotations

from typing import NamedTuple

from legato_engine.device.base import Stream
from legato_engine.kernels.decode_loop import place_behind
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.resources import Resources


class Changes(NamedTuple):
    """What a slot has staged besides tokens and prompts."""

    grows: bool = False  # pages begin
    places: bool = False  # rows go on behind the loop in the other slot


def upload_step(slot: DecodeSlot, changes: Changes, stream: Stream) -> None:
    """Upload a decode's inputs, and what it changes."""
    first = slot.behind if changes.places else slot.staged
    slot.staged.upload_from(slot.grown if changes.grows else first, stream)


def preparation(
    resources: Resources, slot: int, changes: Changes, admit: Work | None = None
) -> Work:
    """Add the pages that begin, admit prompts by `admit`, and place rows behind the loop.

    The staged inputs are uploaded; rows are placed once those of the forward are. Can be captured.
    """
    state, buffers = resources.state, resources.slots[slot]
    staged, index_B = buffers.staged.device, buffers.behind.device["index"]
    next_B = resources.slots[1 - slot].staged.device["position"]

    def work() -> None:
        if changes.grows:
            state.grow(buffers)
        if admit is not None:
            admit()
        if changes.places:
            place_behind(staged, next_B, index_B, state.scratch_row)

    return work
