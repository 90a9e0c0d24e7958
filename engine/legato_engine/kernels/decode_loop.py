"""The control step of a decode loop: what ends each step that the host does not launch.

This is the specification of `cuda/sources/decode_loop.cu`, and what a CPU runs.

Shape legend: B tokens or rows of a step, F rows that were fed, R rows of the state, S steps of a
loop, C constraints, N bytes of a step's outputs.
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
class AnyLoop:
    """What every control step reads and writes; int64, but for bytes.

    On the device: the sampled `token_B` (-1: not finite), the rows' `constraint_B`, the table of
    what follows which, and the loop's `limit` and `step` [1]. `outputs_N` is all that a step has
    for the host, its tokens included. In memory that host and device share: `ring_SN` and `words`
    [2].
    """

    token_B: torch.Tensor
    constraint_B: torch.Tensor
    successor_C2: torch.Tensor
    outputs_N: torch.Tensor
    limit: torch.Tensor
    step: torch.Tensor
    ring_SN: torch.Tensor
    words: torch.Tensor
    scratch_row: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoopTensors(AnyLoop):
    """A loop of one token a row and step: `row_B` with `scratch_row` for padding, and the three
    position fields of the staged step.
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    sample_position_B: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DraftLoopTensors(AnyLoop):
    """A loop of drafting steps, which place and settle their tokens themselves.

    By row of the launch: `row_B` with `scratch_row` for padding, the most draft tokens `room_B`,
    the end `reach_B` of the positions that it may write, its first token `start_B`, and the number
    of tokens `count_B` that the step has returned. By row of the state: the `position_R` of the
    newest token and the last one to feed, `limit_R`.
    """

    row_B: torch.Tensor
    room_B: torch.Tensor
    reach_B: torch.Tensor
    start_B: torch.Tensor
    count_B: torch.Tensor
    position_R: torch.Tensor
    limit_R: torch.Tensor


def control_step(loop: LoopTensors) -> bool:
    """Publish the step's outputs, advance the rows and return whether a step follows.

    None follows after the limit, after a token that is not finite, or when the host wishes so. The
    count of steps is written after their outputs.
    """
    real_B = loop.row_B != loop.scratch_row
    advance(loop.successor_C2, loop.constraint_B, loop.token_B)
    for positions_B in (loop.position_B, loop.fresh_B, loop.sample_position_B):
        positions_B.add_(real_B)
    return _published(loop) and not bool((real_B & (loop.token_B < 0)).any())


def control_drafting_step(loop: DraftLoopTensors) -> bool:
    """Publish the step's outputs, advance constraints and return whether a step follows.

    None follows either after a row's last token, where a row could not write as many draft tokens
    as it may have, or if no row had a token to feed: then the host plans anew.
    """
    fed_B = (loop.row_B != loop.scratch_row) & (loop.count_B > 0)
    for row in fed_B.nonzero()[:, 0].tolist():
        start, count = int(loop.start_B[row]), int(loop.count_B[row])
        for at in range(start, start + count):
            constraint_1, token_1 = loop.constraint_B[row : row + 1], loop.token_B[at : at + 1]
            advance(loop.successor_C2, constraint_1, token_1)
    row_F, start_F, count_F = loop.row_B[fed_B], loop.start_B[fed_B], loop.count_B[fed_B]
    newest_F, broken_F = loop.position_R[row_F], loop.token_B[start_F + count_F - 1] < 0
    left_F = loop.limit_R[row_F] - newest_F
    end_F = newest_F + 1 + torch.minimum(loop.room_B[fed_B].clamp(min=0), left_F)
    goes_on_F = (left_F >= 0) & (end_F <= loop.reach_B[fed_B]) & ~broken_F
    return _published(loop) and len(row_F) > 0 and bool(goes_on_F.all())


def _published(loop: AnyLoop) -> bool:
    """Count the step, once its outputs are in the ring; whether another may follow."""
    step = int(loop.step)
    loop.ring_SN[step] = loop.outputs_N
    loop.step.add_(1)
    loop.words[DONE] = step + 1
    return step + 1 < int(loop.limit) and not int(loop.words[STOP])


def advance(successor_C2: torch.Tensor, constraint_B: torch.Tensor, token_B: torch.Tensor) -> None:
    """Replace each constraint by the one that follows it after the token sampled under it."""
    constraint_B.copy_(_successor(successor_C2, constraint_B, token_B))


def follow(
    successor_C2: torch.Tensor,
    constraint_B: torch.Tensor,
    token_B: torch.Tensor,
    after_B: torch.Tensor,
) -> None:
    """Let constraint b follow token `after_B[b]`, sampled under it; it stays where that is below 0.

    Can be captured.
    """
    after = _successor(successor_C2, constraint_B, token_B[after_B.clamp(min=0)])
    constraint_B.copy_(torch.where(after_B < 0, constraint_B, after))


def _successor(
    successor_C2: torch.Tensor, constraint_B: torch.Tensor, token_B: torch.Tensor
) -> torch.Tensor:
    on_B, then_B = successor_C2[constraint_B].unbind(-1)
    return torch.where((on_B == ANY) | (on_B == token_B), then_B, constraint_B)


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
