"""The control step of a decode loop: what ends each step that the host does not launch.

This is the specification of `cuda/sources/decode_loop.cu`, and what a CPU runs.

Shape legend: B tokens of a step, S steps of a loop, C constraints, N bytes of a step's outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

DONE, STOP = 0, 1
"""Indices of a ring's words: the number of steps whose tokens are there, and the host's wish that
the loop end.
"""

NOT_BEHIND = -1
"""The index of a token that is not behind a loop."""

ANY = -2
"""No token of a table of successors, nor the id of one that is not finite."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoopTensors:
    """What the control step reads and writes; int64, but for bytes.

    On the device: `row_B` with `scratch_row` for padding, the three position fields of the staged
    step, the sampled `token_B` (-1: not finite), each token's `constraint_B`, the table of what
    follows which, and the loop's `limit` and `step` [1]. `outputs_N` is all that a step has for
    the host, its tokens included. In memory that host and device share: `ring_SN` and `words` [2].
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    sample_position_B: torch.Tensor
    token_B: torch.Tensor
    constraint_B: torch.Tensor
    successor_C2: torch.Tensor
    outputs_N: torch.Tensor
    limit: torch.Tensor
    step: torch.Tensor
    ring_SN: torch.Tensor
    words: torch.Tensor
    scratch_row: int


def control_step(loop: LoopTensors) -> bool:
    """Publish the step's outputs, advance the rows and return whether a step follows.

    None follows after the limit, after a token that is not finite, or when the host wishes so. The
    count of steps is written after their outputs.
    """
    step = int(loop.step)
    real_B = loop.row_B != loop.scratch_row
    loop.ring_SN[step] = loop.outputs_N
    advance(loop.successor_C2, loop.constraint_B, loop.token_B)
    for positions_B in (loop.position_B, loop.fresh_B, loop.sample_position_B):
        positions_B.add_(real_B)
    broken = bool((real_B & (loop.token_B < 0)).any())
    loop.step.add_(1)
    loop.words[DONE] = step + 1
    return not broken and step + 1 < int(loop.limit) and not int(loop.words[STOP])


def advance(successor_C2: torch.Tensor, constraint_B: torch.Tensor, token_B: torch.Tensor) -> None:
    """Replace each constraint by the one that follows it after the token sampled under it."""
    on_B, then_B = successor_C2[constraint_B].unbind(-1)
    constraint_B.copy_(torch.where((on_B == ANY) | (on_B == token_B), then_B, constraint_B))


def place_behind(
    staged: Mapping[str, torch.Tensor],
    next_B: torch.Tensor,
    index_B: torch.Tensor,
    scratch_row: int,
) -> None:
    """Place tokens of rows that were in a loop: token b is at the loop's next position of its row
    `index_B[b]`.

    `staged` has the fields of a step, with the last position that the token may have. Where the
    loop has gone past it, the row has ended and the token becomes padding. Can be captured.
    """
    behind_B = index_B >= 0
    start_B = next_B[index_B.clamp(min=0)]
    ended_B = behind_B & (start_B > staged["position"])
    start_B = start_B.masked_fill(ended_B, 0)
    for name, first in (("position", 0), ("fresh", ended_B), ("sample_position", 1)):
        staged[name].copy_(torch.where(behind_B, start_B + first, staged[name]))
    for name in ("row", "source", "sample_row"):
        staged[name].masked_fill_(ended_B, scratch_row)
