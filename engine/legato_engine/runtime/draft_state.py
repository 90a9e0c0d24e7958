"""Device-side speculative decoding: block sizes, draft tokens, row positions and acceptance.

A row feeds its newest token and up to K draft tokens after it. Only the device knows how many, and
at which positions, because the previous launch may not be read back yet. The host stages the rows
and the most draft tokens that each has pages for.

Shape legend: R rows of the state, S rows of a launch, B tokens of its largest batch, K draft
tokens, C positions, D width, M pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from legato_engine.kernels.accelerated import draft_kernels
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.reference_drafts import ReferenceDrafts
from legato_engine.runtime.request_descriptors import NO_DRAFTS, WORDS
from legato_engine.speculative.block_policy import BlockPolicy
from legato_engine.speculative.budget_policy import AcceptanceCounts, TokenBudgetPolicy
from legato_engine.speculative.proposer import UNKNOWN, Proposer, RowHistory

_MAX_GROUPS = 3


class Layout(NamedTuple):
    """A batch that a forward is prepared for: `groups` of adjacent tokens of one row are fast."""

    tokens: int
    groups: int


class DraftState:
    """Tensors by row, and the work on them around a forward.

    `allot`, `propose` and `place` run before a decode's forward, `settle` after every sampling. All
    can be captured.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: BlockPolicy,
        *,
        num_rows: int,  # without the scratch row
        max_context: int,
        vocab_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows, block = num_rows + 1, policy.max_block
        self.max_block = block
        self.num_rows = num_rows
        self.scratch_row = num_rows
        self.tokens_RC = torch.full((rows, max_context + 1), UNKNOWN, device=device)
        self.position_R = torch.zeros(rows, dtype=torch.int64, device=device)  # of the newest token
        self.hidden_RD = torch.zeros(rows, width, dtype=dtype, device=device)  # sampled from
        self.limit_R = torch.full((rows,), -1, device=device)  # last position to feed
        self.draft_RK = torch.full((rows, block), UNKNOWN, device=device)
        self.descriptor_R4 = torch.zeros(rows, WORDS, dtype=torch.int64, device=device)
        self.overall = torch.zeros(2, dtype=torch.float64, device=device)
        self.block_S = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.blocks = _blocks(block) if proposer.sequential else (block,)
        self.proposal = torch.zeros(1, dtype=torch.int32, device=device)  # index of `blocks`
        self.choice = torch.zeros(1, dtype=torch.int32, device=device)  # of a batch
        self._proposal_K = torch.tensor(
            [self.proposal_for(count) for count in range(block + 1)],
            dtype=torch.int32,
            device=device,
        )
        self._choice_B3 = torch.zeros(1, _MAX_GROUPS, dtype=torch.int32, device=device)
        self._row_R = torch.arange(rows, device=device)
        self.proposer = proposer
        self.policy = policy
        kernels = draft_kernels(policy, num_rows=num_rows, vocab_size=vocab_size, device=device)
        self.operations = kernels or ReferenceDrafts(policy, vocab_size)
        self.forget()

    # ------------------------------------------------------------ set-up

    def lay_out(self, layouts: Sequence[Layout], most_tokens: int) -> None:
        """Let `choice` be the index of the smallest of these batches, ascending in tokens."""
        table = [
            [_choice(layouts, tokens, groups) for groups in range(1, _MAX_GROUPS + 1)]
            for tokens in range(most_tokens + 1)
        ]
        on = self.choice.device
        self._choice_B3 = torch.tensor(table, dtype=torch.int32, device=on)

    def set_costs(self, policy: TokenBudgetPolicy) -> None:
        """Nothing may be in flight."""
        self.operations.set_costs(policy)

    def proposal_for(self, count: int) -> int:
        """The index of the shortest proposal with so many draft tokens; none has 0."""
        if not count:
            return len(self.blocks)
        return next(index for index, block in enumerate(self.blocks) if block >= count)

    def forget(self) -> None:
        """Forget how many tokens were accepted."""
        counts = AcceptanceCounts()
        self.overall[0], self.overall[1] = counts.accepted_weight, counts.tried_weight

    def rehearse(self, position: int, *, spare: int) -> None:
        """Put all rows at a position, with draft tokens, `spare` positions before their last."""
        self.position_R.fill_(position)
        self.limit_R.fill_(position + spare)
        self.draft_RK.zero_()

    def clear(self) -> None:
        self.position_R.zero_()
        self.limit_R.fill_(-1)
        self.draft_RK.fill_(UNKNOWN)
        self.tokens_RC.fill_(UNKNOWN)
        self.descriptor_R4.zero_()
        self.forget()

    # ------------------------------------------------------------ the work of launches

    def admit(self, slot: DecodeSlot) -> None:
        staged = slot.prompt.device
        self.tokens_RC.index_copy_(0, staged["row"], staged["history"])
        self.limit_R.index_copy_(0, staged["row"], staged["limit"])
        self.descriptor_R4.index_copy_(0, staged["row"], staged["descriptor"])

    def allot(self, slot: DecodeSlot, page_table_RM: torch.Tensor) -> None:
        """Choose the rows' blocks and the proposal; add staged pages to the page table."""
        self.operations.allot(self, slot.staged.device, page_table_RM, self._proposal_K)

    def propose(self, slot: DecodeSlot, page_table_RM: torch.Tensor, block: int) -> None:
        """Fill `block` draft tokens a row; on the CPU, of staged rows only."""
        state = (self._row_R, self.tokens_RC, self.position_R, self.hidden_RD, page_table_RM)
        if self.draft_RK.device.type != "cpu":
            self.proposer.propose(RowHistory(*state), self.draft_RK[:, :block])
            return
        row_S, room_S = (slot.staged.device[name] for name in ("scheduled_row", "room"))
        row_P = row_S[(row_S != self.scratch_row) & (room_S != NO_DRAFTS)]
        if not len(row_P):
            return
        draft_PK = self.draft_RK[row_P, :block]
        self.proposer.propose(RowHistory(*(each[row_P] for each in state)), draft_PK)
        self.draft_RK[row_P, :block] = draft_PK

    def place(self, slot: DecodeSlot) -> None:
        """Give each token its row, id and position; choose the batch."""
        self.operations.place(self, slot.staged.device, self._choice_B3)

    def settle(self, slot: DecodeSlot, batch: int, token_R: torch.Tensor) -> None:
        """Accept draft tokens that were also sampled; put each row's newest token into `token_R`.

        A row's sampled tokens are valid up to the one after its last accepted draft token.
        """
        self.operations.settle(
            self,
            slot.staged.device,
            slot.tokens_R,
            slot.hidden_RD,
            token_R,
            slot.outputs.device,
            min(batch, self.num_rows),
        )


def _blocks(limit: int) -> tuple[int, ...]:
    """The powers of two below `limit`, and `limit`."""
    return (*(1 << bit for bit in range(limit.bit_length()) if 1 << bit < limit), limit)


def _choice(layouts: Sequence[Layout], tokens: int, groups: int) -> int:
    """The index of a batch for so many tokens in so many groups (`_MAX_GROUPS` or more)."""
    fits = [index for index, each in enumerate(layouts) if each.tokens >= tokens]
    if not fits:
        return len(layouts) - 1  # never planned
    smallest = layouts[fits[0]].tokens
    same = [index for index in fits if layouts[index].tokens == smallest]
    enough = [index for index in same if layouts[index].groups >= groups]
    return min(enough or same, key=lambda index: layouts[index].groups)
