"""Speculation on the device: where every row stands, what it proposes, and what of that stands.

A launch's row has a lane for each token that it feeds: lane 0 feeds the newest token, lane j the
j-th proposed one. The host stages which lanes there are; where they stand is known here alone, as
the launch in front may not be read yet. A lane that has nothing to feed becomes padding.

Shape legend: R rows of the state, B lanes of a launch, K proposed tokens, C positions, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.speculative.proposer import UNKNOWN, Proposer, RowHistory

if TYPE_CHECKING:
    from legato_engine.kernels.cuda.drafting import DraftKernels

_NO_LANE = -2  # in place of a sampled token, which may also be -1: not finite


class DraftState:
    """Per-row tensors beside those of `RowState`, and the work on them around a forward.

    `place` runs in front of a decode's forward and `settle` behind every sampling, in the stream's
    order: what one leaves is what the next reads, with no host between them. All of it has fixed
    addresses and can be captured.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        num_rows: int,
        max_context: int,
        vocab_size: int,
        width: int,
        max_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_rows` without the scratch row, which is one more."""
        rows = num_rows + 1
        self.max_block = max_block
        self.blocks = tuple(sorted({0, *_powers(max_block), max_block}))
        self.scratch_row = num_rows
        self.tokens_RC = torch.full((rows, max_context + 1), UNKNOWN, device=device)
        self.position_R = torch.zeros(rows, dtype=torch.int64, device=device)  # of the newest
        self.hidden_RD = torch.zeros(rows, width, dtype=dtype, device=device)  # it came from
        self.limit_R = torch.full((rows,), -1, device=device)  # the last that may be fed
        self.draft_RK = torch.full((rows, max_block), UNKNOWN, device=device)
        self._sampled_RL = torch.full((rows, max_block + 1), _NO_LANE, device=device)  # by lane
        self._row_R = torch.arange(rows, device=device)
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._kernels = _kernels(max_block, vocab_size, device)

    def admit(self, slot: DecodeSlot) -> None:
        """Take what is known of a sequence from its staged prefill, and where it ends."""
        staged = slot.prompt.device
        self.tokens_RC.index_copy_(0, staged["row"], staged["history"])
        self.limit_R.index_copy_(0, staged["row"], staged["limit"])

    def rehearse(self, position: int) -> None:
        """Let all rows stand at a position with tokens proposed, for who measures a step or two."""
        self.position_R.fill_(position)
        self.limit_R.fill_(position + 2 * self.max_block + 2)
        self.draft_RK.zero_()

    def clear(self) -> None:
        """No row is anybody's."""
        self.position_R.zero_()
        self.limit_R.fill_(-1)
        self.draft_RK.fill_(UNKNOWN)
        self.tokens_RC.fill_(UNKNOWN)

    def block(self, slot: DecodeSlot) -> int:
        """How many tokens `place` has to propose for what is staged: one of `blocks`."""
        return next(block for block in self.blocks if block >= slot.num_drafts)

    def place(self, slot: DecodeSlot, batch: int, page_table_RM: torch.Tensor, block: int) -> None:
        """Propose `block` tokens, as many as a row has lanes for or more; and give each staged lane
        its token and its position, or nothing to feed.
        """
        self._propose(slot, batch, page_table_RM, block)
        if self._kernels is not None:
            self._kernels.place(self, slot.staged.device, batch)
            return
        draft_RK = self.draft_RK
        known_RK = (draft_RK >= 0) & (draft_RK < self._vocab_size)
        draft_RK.masked_fill_(known_RK.cumprod(1) == 0, UNKNOWN)
        staged = {name: field[:batch] for name, field in slot.staged.device.items()}
        row_B, draft_index_B = staged["row"], staged["draft_index"]
        first_B = self.position_R[row_B]
        draft_B = draft_RK[row_B, (draft_index_B - 1).clamp(min=0)]
        position_B = first_B + draft_index_B
        is_newest_B = draft_index_B == 0
        idle_B = (position_B > self.limit_R[row_B]) | ~(is_newest_B | (draft_B != UNKNOWN))
        staged["source"].copy_(row_B.masked_fill(~is_newest_B, -1).masked_fill(idle_B, -1))
        staged["token"].copy_(draft_B.masked_fill(is_newest_B | idle_B, 0))
        staged["position"].copy_(position_B.masked_fill(idle_B, 0))
        staged["fresh"].copy_(first_B.masked_fill(idle_B, 1))
        staged["sample_position"].copy_((position_B + 1).masked_fill(idle_B, 0))
        row_B.masked_fill_(idle_B, self.scratch_row)
        staged["sample_row"].copy_(row_B)

    def _propose(
        self, slot: DecodeSlot, batch: int, page_table_RM: torch.Tensor, block: int
    ) -> None:
        """Fill the front of `draft_RK`; where shapes are free, only of the rows that are staged."""
        state = (self._row_R, self.tokens_RC, self.position_R, self.hidden_RD, page_table_RM)
        if not block:
            return
        if self.draft_RK.device.type != "cpu":
            self._proposer.propose(RowHistory(*state), self.draft_RK[:, :block])
            return
        row_B, draft_index_B = (slot.staged.device[name][:batch] for name in ("row", "draft_index"))
        row_P = row_B[(draft_index_B == 0) & (row_B != self.scratch_row)]
        if not len(row_P):
            return
        draft_PK = self.draft_RK[row_P, :block]
        self._proposer.propose(RowHistory(*(each[row_P] for each in state)), draft_PK)
        self.draft_RK[row_P, :block] = draft_PK

    def settle(self, slot: DecodeSlot, batch: int, token_R: torch.Tensor) -> None:
        """Accept what was proposed and sampled alike, and put the newest token into `token_R`.

        A row's sampled tokens are right up to the lane behind the last accepted one: those behind
        it followed a token that is not there. Leaves the counts in the slot's outputs.
        """
        staged, outputs = slot.staged.device, slot.outputs.device
        if self._kernels is not None:
            sampled, hidden = slot.tokens_R, slot.hidden_RD
            self._kernels.settle(self, staged, sampled, hidden, token_R, outputs, batch)
            return
        row_B, draft_index_B = staged["sample_row"][:batch], staged["draft_index"][:batch]
        position_B, token_B = staged["sample_position"][:batch], slot.tokens_R[:batch]
        sampled_RL = self._sampled_RL.fill_(_NO_LANE)
        sampled_RL[row_B, draft_index_B] = token_B
        sampled_RL[self.scratch_row].fill_(_NO_LANE)
        was_fed_RK = sampled_RL[:, 1:] != _NO_LANE
        right_RK = (sampled_RL[:, :-1] == self.draft_RK) & was_fed_RK
        accepted_R = right_RK.cumprod(1).sum(1)
        accepted_B = accepted_R[row_B]
        count_R = accepted_R + (sampled_RL[:, 0] != _NO_LANE)
        outputs["count"][:batch].copy_(count_R[row_B])
        outputs["proposed"][:batch].copy_(was_fed_RK.sum(1)[row_B])
        stands_B = row_B.masked_fill(draft_index_B > accepted_B, self.scratch_row)
        self.tokens_RC[stands_B, position_B] = token_B
        newest_B = row_B.masked_fill(draft_index_B != accepted_B, self.scratch_row)
        self.position_R[newest_B] = position_B
        self.hidden_RD[newest_B] = slot.hidden_RD[:batch]
        token_R[newest_B] = token_B.clamp(min=0)


def _powers(limit: int) -> list[int]:
    """1, 2, 4 and so on, as long as they are below `limit`."""
    return [1 << bit for bit in range(limit.bit_length()) if 1 << bit < limit]


def _kernels(max_block: int, vocab_size: int, device: torch.device) -> DraftKernels | None:
    """Two launches where torch would make thirty, on a GPU."""
    if device.type != "cuda":
        return None
    from legato_engine.kernels.cuda.drafting import DraftKernels

    return DraftKernels(max_block, vocab_size)
