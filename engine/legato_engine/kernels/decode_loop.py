"""Decode loops: the control step, and the launches that a kernel of many steps offers.

This is the specification of `cuda/sources/decode_loop.cu`, and what a CPU runs.

Shape legend: B tokens or rows of a step, F rows that were fed, R rows of the state, S steps of a
loop, C constraints, N bytes of a step's outputs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from legato_engine.kernels.cuda.drafting import DraftTensors
from legato_engine.kernels.cuda.sampling import RowTensors

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
    """Tensors of a loop's control step; int64, except bytes.

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


# ---------------------------------------------------------------- resident builds

# Which builds of the resident kernel there are.


class BatchKind(enum.StrEnum):
    """Token contents of a launch: ids only, with values, with draft tokens, or both."""

    WORDS = "words"
    VALUES = "values"
    DRAFTS = "drafts"
    BOTH = "values and drafts"

    @staticmethod
    def of(*, values: bool, drafts: bool) -> BatchKind:
        if drafts:
            return BatchKind.BOTH if values else BatchKind.DRAFTS
        return BatchKind.VALUES if values else BatchKind.WORDS

    @property
    def has_values(self) -> bool:
        return self in (BatchKind.VALUES, BatchKind.BOTH)

    @property
    def has_drafts(self) -> bool:
        return self in (BatchKind.DRAFTS, BatchKind.BOTH)

    def counts_as(self, num_rows: int, num_tokens: int) -> int:
        """Return the rows that a launch of `num_tokens` tokens counts as: with both, its tokens, as
        rows with values have one each.
        """
        return num_tokens if self is BatchKind.BOTH else num_rows


class Build(NamedTuple):
    """The kernel for launches that count as up to `rows` rows, with all draft tokens that rows may
    have where all of them draft.
    """

    kind: BatchKind
    rows: int

    def tokens(self, block: int) -> int:
        """The most of a step, with `block` draft tokens of a row."""
        return self.rows if self.kind is BatchKind.BOTH else self.rows * (1 + block)


# ---------------------------------------------------------------- resident launch

# What launches of several decode steps for rows that need no host between them read and write.
#
# Shape legend: B rows of a launch, R rows of the state, M pages of a row, C constraints, V
# vocabulary, S steps.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ResidentDrafts:
    """Speculation of a launch whose first tokens are placed, at fixed addresses.

    Staged fields of tokens and of rows, the draft `state`, the policy's constants and step costs
    (`DraftKernels`), a step's `outputs` by row of the launch and the same fields of the host's
    `ring`, and how many tokens a lookup matches at least and at most.
    """

    staged: Mapping[str, torch.Tensor]
    state: DraftTensors
    rules: torch.Tensor
    seconds_P: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    ring: Mapping[str, torch.Tensor]
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ResidentRows:
    """Step inputs and outputs at fixed addresses; int64 except sampling parameters.

    By row of a launch: its row of the state, its constraint, and the positions of the first step.
    `successor_C2` and `words` [2] are those of `kernels.decode_loop`; `ring_SB` is its ring's
    tokens, beside which are float32 values and their certainties.
    """

    row_B: torch.Tensor
    constraint_B: torch.Tensor
    position_B: torch.Tensor
    sample_position_B: torch.Tensor
    state: RowTensors
    page_table_RM: torch.Tensor
    constraints_CV: torch.Tensor
    successor_C2: torch.Tensor
    ring_SB: torch.Tensor
    payload_SB2: torch.Tensor
    certainty_SB2: torch.Tensor
    words: torch.Tensor
    drafts: ResidentDrafts | None = None


class ResidentSteps(Protocol):
    """Launches of several steps. Every step's control is `kernels.decode_loop.control_step`'s, or
    with drafts `control_drafting_step`'s.
    """

    @property
    def most_rows(self) -> Mapping[BatchKind, int]:
        """Return the maximum rows of its launches, as `counts_as` counts them."""
        ...

    def run(
        self,
        rows: ResidentRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """Enqueue at most `num_steps` steps of the first `num_rows` rows, with drafts of up to
        `num_tokens` tokens each.

        Values are not written where they are not asked for (`payload`).
        """
        ...

    def fault(self) -> str | None:
        """The wait that a launch which is over gave up; no launch may follow it.

        Its last step that the ring counts is whole: tokens, keys, values and rows' newest tokens.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentOffer:
    """Launches of the kernel that a model can have on its device.

    `subject`: what their times depend on, by name. `make` compiles some of the `builds`, and packs
    a second copy of the weights.
    """

    subject: Mapping[str, str]
    builds: tuple[Build, ...]
    make: Callable[[Collection[Build]], ResidentSteps]
