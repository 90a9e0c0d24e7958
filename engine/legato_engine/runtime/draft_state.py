"""Device-side speculative decoding: row positions, draft tokens and acceptance.

A row of a launch feeds its newest token, with draft index 0, and up to K draft tokens, with draft
indices 1 to K. The host stages rows and draft indices. Only the device knows their positions,
because the previous launch may not be read back yet. A token without a draft becomes padding.

Shape legend: R rows of the state, B tokens of a launch, K draft tokens, C positions, D width.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.accelerated import draft_kernels
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.speculative.proposer import UNKNOWN, Proposer, RowHistory

_NOT_FED = -2  # in place of a sampled token; -1 is a sampled token that was not finite


class DraftState:
    """Tensors by row of the state, and the work on them around a forward.

    `place` runs before a decode's forward and `settle` after every sampling, in stream order
    without the host. Both use fixed addresses and can be captured.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        num_rows: int,  # without the scratch row
        max_context: int,
        vocab_size: int,
        width: int,
        max_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = num_rows + 1
        self.max_block = max_block
        self.blocks = tuple(sorted({0, *_powers(max_block), max_block}))
        self.scratch_row = num_rows
        self.tokens_RC = torch.full((rows, max_context + 1), UNKNOWN, device=device)
        self.position_R = torch.zeros(rows, dtype=torch.int64, device=device)  # of the newest token
        self.hidden_RD = torch.zeros(rows, width, dtype=dtype, device=device)  # sampled from
        self.limit_R = torch.full((rows,), -1, device=device)  # last position to feed
        self.draft_RK = torch.full((rows, max_block), UNKNOWN, device=device)
        self._sampled_RL = torch.full(
            (rows, max_block + 1), _NOT_FED, device=device
        )  # by draft index
        self._row_R = torch.arange(rows, device=device)
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._kernels = draft_kernels(max_block, vocab_size, device)

    def admit(self, slot: DecodeSlot) -> None:
        """Take sequences' known tokens and limits from their staged prefill."""
        staged = slot.prompt.device
        self.tokens_RC.index_copy_(0, staged["row"], staged["history"])
        self.limit_R.index_copy_(0, staged["row"], staged["limit"])

    def rehearse(self, position: int) -> None:
        """Put all rows at a position with draft tokens, to measure up to two steps."""
        self.position_R.fill_(position)
        self.limit_R.fill_(position + 2 * self.max_block + 2)
        self.draft_RK.zero_()

    def clear(self) -> None:
        """Forget all sequences."""
        self.position_R.zero_()
        self.limit_R.fill_(-1)
        self.draft_RK.fill_(UNKNOWN)
        self.tokens_RC.fill_(UNKNOWN)

    def block(self, slot: DecodeSlot) -> int:
        """Round the staged number of draft tokens up to one of `blocks`."""
        return next(block for block in self.blocks if block >= slot.num_drafts)

    def place(self, slot: DecodeSlot, batch: int, page_table_RM: torch.Tensor, block: int) -> None:
        """Propose `block` tokens a row; give each staged token its id and position, or padding."""
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
        """Fill the first columns of `draft_RK`; on the CPU, of staged rows only."""
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
        """Accept draft tokens that were also sampled; put each row's newest token into `token_R`.

        A row's sampled tokens are valid up to the one after its last accepted draft token; later
        ones were sampled after a rejected token. Writes the counts to the slot's outputs.
        """
        staged, outputs = slot.staged.device, slot.outputs.device
        if self._kernels is not None:
            sampled, hidden = slot.tokens_R, slot.hidden_RD
            self._kernels.settle(self, staged, sampled, hidden, token_R, outputs, batch)
            return
        row_B, draft_index_B = staged["sample_row"][:batch], staged["draft_index"][:batch]
        position_B, token_B = staged["sample_position"][:batch], slot.tokens_R[:batch]
        sampled_RL = self._sampled_RL.fill_(_NOT_FED)
        sampled_RL[row_B, draft_index_B] = token_B
        sampled_RL[self.scratch_row].fill_(_NOT_FED)
        was_fed_RK = sampled_RL[:, 1:] != _NOT_FED
        right_RK = (sampled_RL[:, :-1] == self.draft_RK) & was_fed_RK
        accepted_R = right_RK.cumprod(1).sum(1)
        accepted_B = accepted_R[row_B]
        count_R = accepted_R + (sampled_RL[:, 0] != _NOT_FED)
        outputs["count"][:batch].copy_(count_R[row_B])
        outputs["proposed"][:batch].copy_(was_fed_RK.sum(1)[row_B])
        accepted_row_B = row_B.masked_fill(draft_index_B > accepted_B, self.scratch_row)
        self.tokens_RC[accepted_row_B, position_B] = token_B
        newest_row_B = row_B.masked_fill(draft_index_B != accepted_B, self.scratch_row)
        self.position_R[newest_row_B] = position_B
        self.hidden_RD[newest_row_B] = slot.hidden_RD[:batch]
        token_R[newest_row_B] = token_B.clamp(min=0)


def _powers(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length()) if 1 << bit < limit]
