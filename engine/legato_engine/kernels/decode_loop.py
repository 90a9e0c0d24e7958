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
"""Indices of a ring's words: the number of published steps, and the host's stop flag."""

NOT_BEHIND = -1
"""Index of a token that is not behind a loop."""

ANY = -2
"""Transition on any token: no token's id, nor that of logits that are not finite."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AnyLoop:
    """Tensors of a loop's control step; int64, except bytes.

    On the device: the sampled `token_B` (-1: not finite), the rows' `constraint_B`, the transition
    table, and the loop's `limit` and `step` [1]. `outputs_N` is everything that a step publishes,
    its tokens included. In memory that host and device share: `ring_SN` and `words` [2].
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

    def _published(self) -> bool:
        """Publish the step's outputs and return whether another step may follow."""
        step = int(self.step)
        self.ring_SN[step] = self.outputs_N
        self.step.add_(1)
        self.words[DONE] = step + 1
        return step + 1 < int(self.limit) and not int(self.words[STOP])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoopTensors(AnyLoop):
    """Tensors of a loop with one token per row and step.

    `row_B` has `scratch_row` for padding; the other fields are the staged step's positions.
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    sample_position_B: torch.Tensor

    def control_step(self) -> bool:
        """Publish the step's outputs, advance the rows and return whether a step follows.

        None follows after the limit, after a token that is not finite, or if the host's stop flag
        is set. The count of steps is written after their outputs.
        """
        real_B = self.row_B != self.scratch_row
        advance(self.successor_C2, self.constraint_B, self.token_B)
        for positions_B in (self.position_B, self.fresh_B, self.sample_position_B):
            positions_B.add_(real_B)
        return self._published() and not bool((real_B & (self.token_B < 0)).any())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DraftLoopTensors(AnyLoop):
    """Tensors of a loop of drafting steps, which place and verify their tokens themselves.

    By row of the launch: `row_B` with `scratch_row` for padding, the maximum draft tokens `room_B`,
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

    def control_step(self) -> bool:
        """Publish the step's outputs, advance constraints and return whether a step follows.

        No step follows after a row's last token, where a row's pages do not suffice for its
        maximum of draft tokens, or if no row had a token to feed: then the host plans anew.
        """
        fed_B = (self.row_B != self.scratch_row) & (self.count_B > 0)
        for row in fed_B.nonzero()[:, 0].tolist():
            start, count = int(self.start_B[row]), int(self.count_B[row])
            for at in range(start, start + count):
                constraint_1, token_1 = self.constraint_B[row : row + 1], self.token_B[at : at + 1]
                advance(self.successor_C2, constraint_1, token_1)
        row_F, start_F, count_F = self.row_B[fed_B], self.start_B[fed_B], self.count_B[fed_B]
        newest_F, broken_F = self.position_R[row_F], self.token_B[start_F + count_F - 1] < 0
        left_F = self.limit_R[row_F] - newest_F
        end_F = newest_F + 1 + torch.minimum(self.room_B[fed_B].clamp(min=0), left_F)
        goes_on_F = (left_F >= 0) & (end_F <= self.reach_B[fed_B]) & ~broken_F
        return self._published() and len(row_F) > 0 and bool(goes_on_F.all())


Loop = LoopTensors | DraftLoopTensors


def advance(successor_C2: torch.Tensor, constraint_B: torch.Tensor, token_B: torch.Tensor) -> None:
    constraint_B.copy_(_successor(successor_C2, constraint_B, token_B))


def follow(
    successor_C2: torch.Tensor,
    constraint_B: torch.Tensor,
    token_B: torch.Tensor,
    after_B: torch.Tensor,
) -> None:
    """Advance constraint b by token `after_B[b]`; keep it where that index is below 0.

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
    """Place tokens of rows that were in a loop at the loop's next positions.

    Token b continues row `index_B[b]` of the loop. `staged` has the fields of a step, with the last
    position that the token may have. Where the loop has passed it, the row has ended and the token
    becomes padding. Can be captured.
    """
    behind_B = index_B >= 0
    start_B = next_B[index_B.clamp(min=0)]
    ended_B = behind_B & (start_B > staged["position"])
    start_B = start_B.masked_fill(ended_B, 0)
    for name, first in (("position", 0), ("fresh", ended_B), ("sample_position", 1)):
        staged[name].copy_(torch.where(behind_B, start_B + first, staged[name]))
    for name in ("row", "source", "sample_row"):
        staged[name].masked_fill_(ended_B, scratch_row)


# ---------------------------------------------------------------- megakernel builds


class BatchKind(enum.StrEnum):
    """Kind of tokens in a launch: words only, with values, with draft tokens, or both."""

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
        """Return the rows that a launch counts as: its tokens with both.

        Rows with values have one token each, drafting rows several.
        """
        return num_tokens if self is BatchKind.BOTH else num_rows


class Build(NamedTuple):
    """Compiled megakernel for launches that count as up to `rows` rows.

    With drafts it has room for all draft tokens that the policy may give these rows.
    """

    kind: BatchKind
    rows: int

    def tokens(self, block: int) -> int:
        """Return the maximum tokens of a step, with up to `block` draft tokens a row."""
        return self.rows if self.kind is BatchKind.BOTH else self.rows * (1 + block)


# ---------------------------------------------------------------- megakernel launch

# Shape legend: B rows of a launch, R rows of the state, M pages of a row, C constraints, V
# vocabulary, S steps.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MegakernelDrafts:
    """Drafting tensors of a launch whose first tokens are placed, at fixed addresses.

    Staged fields of tokens and of rows, the draft `state`, the policy's constants and step costs
    (`DraftKernels`), a step's `outputs` by row of the launch and the same fields of the host's
    `ring`, and the minimum and maximum `lengths` of a lookup's match.
    """

    staged: Mapping[str, torch.Tensor]
    state: DraftTensors
    rules: torch.Tensor
    seconds_P: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    ring: Mapping[str, torch.Tensor]
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MegakernelRows:
    """Step inputs and outputs at fixed addresses; int64 except sampling parameters.

    By row of a launch: its row of the state, its constraint, and the positions of the first step.
    `successor_C2` and `words` [2] are those of `AnyLoop`; `ring_SB` has the ring's tokens,
    `payload_SB2` and `certainty_SB2` its float32 values and their certainties.
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
    drafts: MegakernelDrafts | None = None


class MegakernelSteps(Protocol):
    """Launches of several steps in one kernel.

    Every step ends as `LoopTensors.control_step`, or with drafts `DraftLoopTensors.control_step`.
    """

    @property
    def max_rows(self) -> Mapping[BatchKind, int]:
        """Return the maximum rows of its launches, as `counts_as` counts them."""

    def run(
        self,
        rows: MegakernelRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """Enqueue at most `num_steps` steps of the first `num_rows` rows.

        With drafts a step has up to `num_tokens` tokens.

        Values are written with `payload` only.
        """

    def fault(self) -> str | None:
        """Return the wait that timed out in a finished launch, or None; no launch may follow it.

        The last step that the ring counts is whole: tokens, keys, values and rows' newest tokens.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class MegakernelOffer:
    """Megakernel builds that a model can run on its device.

    `subject`: everything that their times depend on, by name. `make` compiles some of the `builds`
    and packs a second copy of the weights.
    """

    subject: Mapping[str, str]
    builds: tuple[Build, ...]
    make: Callable[[Collection[Build]], MegakernelSteps]
