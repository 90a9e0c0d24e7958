"""Speculative decoding on the device.

Shape legend: R rows, K draft tokens, C positions, W tokens that a row catches up at once, M pages
of a row, D the draft's width, B tokens of any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from legato_engine.device.base import Device
from legato_engine.errors import InvalidField
from legato_engine.kernels.accelerated import DraftKernels, LookupKernel, RowTensors
from legato_engine.kernels.decode_loop import DONE, MegakernelDrafts
from legato_engine.kernels.proposer import UNKNOWN, RowHistory
from legato_engine.models.base import Model
from legato_engine.models.paged_attention import DecodeBatch
from legato_engine.runtime.buffers import TokenRing
from legato_engine.runtime.decode_slot import DraftState, Resources, StepLayout
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.kv_pool import allocate

CATCH_UP = 8
_PAGE_SIZE = 16


class DraftModel:
    """A `Proposer` that takes the likeliest tokens of any `Model`.

    It sees text alone: its positions count from a row's first known token. Comparing its cached
    tokens with each row's history finds new sequences and rejected draft tokens alike. From the
    first difference it feeds up to `CATCH_UP` known tokens per proposal, and proposes nothing until
    it has the newest. It can be captured.
    """

    sequential = True

    def __init__(self, model: Model, device: Device, *, num_rows: int, vocab_size: int) -> None:
        """Allocate a cache for `num_rows` rows, and the scratch row.

        Raises:
            InvalidField: the draft's vocabulary is not `vocab_size`, the served model's.
        """
        if model.vocab_size != vocab_size:
            raise InvalidField(
                f"the draft has {model.vocab_size} tokens, the model has {vocab_size}",
                field="draft",
            )
        on = device.torch_device
        num_pages = -(-model.max_context // _PAGE_SIZE)
        rows = num_rows + 1
        self._model = model
        self._scratch = num_rows
        self._kv = allocate(model, device, 1 + rows * num_pages, _PAGE_SIZE)
        self._table_RM = 1 + torch.arange(rows * num_pages, device=on).view(rows, num_pages)
        self._table_RM[self._scratch] = 0
        self._cached_RC = torch.full((rows, model.max_context), UNKNOWN, device=on)
        self._position_C = torch.arange(model.max_context, device=on)

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        row_R, (known_RC, newest_R) = history.row_R, self._from_first(history)
        context = self._position_C.shape[0]
        new_RC = (known_RC != self._cached_RC[row_R]) | (self._position_C >= newest_R[:, None])
        first_R = new_RC.to(torch.uint8).argmax(1)
        missing_R = newest_R - first_R
        ready_R = (newest_R < context) & (missing_R < CATCH_UP)
        position_RW = first_R[:, None] + self._position_C[:CATCH_UP]
        is_known_RW = (position_RW <= newest_R[:, None]) & (position_RW < context)
        token_RW = known_RC.gather(1, position_RW.clamp(max=context - 1))
        hidden_BD = self._feed(
            row_R[:, None].expand_as(position_RW).flatten(),
            token_RW.flatten(),
            position_RW.flatten(),
            is_known_RW.flatten(),
        )
        last_R = missing_R.clamp(0, CATCH_UP - 1)
        hidden_RWD = hidden_BD.view(*position_RW.shape, -1)
        index_R11 = last_R[:, None, None].expand(-1, 1, hidden_RWD.shape[-1])
        hidden_RD = hidden_RWD.gather(1, index_R11)[:, 0]
        for step in range(draft_RK.shape[1]):
            token_R = self._model.logits(hidden_RD).argmax(-1)
            draft_RK[:, step] = token_R.masked_fill(~ready_R, UNKNOWN)
            position_R = newest_R + step + 1
            if step + 1 < draft_RK.shape[1]:
                fits_R = ready_R & (position_R < context)
                hidden_RD = self._feed(row_R, token_R, position_R, fits_R)

    def _from_first(self, history: RowHistory) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_RC = history.tokens_RC
        first_R = (tokens_RC != UNKNOWN).to(torch.uint8).argmax(1)
        position_RC = first_R[:, None] + self._position_C
        known_RC = tokens_RC.gather(1, position_RC.clamp(max=tokens_RC.shape[1] - 1))
        return known_RC, history.position_R - first_R

    def _feed(
        self,
        row_B: torch.Tensor,
        token_B: torch.Tensor,
        position_B: torch.Tensor,
        is_fed_B: torch.Tensor,
    ) -> torch.Tensor:
        """[B, D] residual streams; others become padding."""
        row_B = row_B.masked_fill(~is_fed_B, self._scratch)
        position_B = position_B.masked_fill(~is_fed_B, 0)
        token_B = token_B.clamp(min=0)
        self._cached_RC[row_B, position_B] = token_B
        payload_B2 = torch.zeros(len(token_B), 2, device=token_B.device)
        batch = DecodeBatch(position_B, self._table_RM[row_B])
        return self._model.decode(self._model.embed(token_B, payload_B2), batch, self._kv)


# ---------------------------------------------------------------- drafting decode


class DraftingDecode:
    """Decodes of each slot with speculation.

    Block sizes, a proposal, and the forward of the batch that results from both.
    """

    def __init__(self, resources: Resources, layouts: Sequence[StepLayout]) -> None:
        drafts = resources.state.drafts
        assert drafts is not None, "only draft tokens are placed by the device"
        self._resources = resources
        self._drafts = drafts
        self._layouts = tuple(layouts)
        drafts.lay_out(self._layouts, resources.buckets[-1])

    def work(
        self, slot: int, make_forward: Callable[..., Work], adapted: int, *, forces: bool
    ) -> Work:
        """`make_forward(slot, tokens, groups, adapted)` makes the forward of a batch.

        With `forces` rows may have forced tokens.
        """
        drafts, buffers = self._drafts, self._resources.slots[slot]
        graphs, table_RM = self._resources.graphs, self._resources.state.page_table_RM

        def make_proposal(slot: int, block: int) -> Work:
            return lambda: drafts.propose(buffers, table_RM, block)

        propose = graphs.switch(
            drafts.proposal, make_proposal, [(slot, block) for block in drafts.blocks]
        )
        forward = graphs.switch(
            drafts.choice, make_forward, [(slot, *layout, adapted) for layout in self._layouts]
        )

        def work() -> None:
            drafts.allot(buffers, table_RM)
            propose()
            if forces:
                drafts.force(buffers)
            drafts.place(buffers)
            # A conditional node comes first: a forward's kernels read positions before the previous
            # kernel of their graph has ended.
            forward()

        return work

    def sampling(self, slot: int, make_sample: Callable[..., Work], *shape: bool) -> Work:
        """Sample a loop's step, whose batch only the device knows, and settle all rows.

        `make_sample(slot, tokens, *shape)` makes the sampling of a batch.
        """
        drafts, buffers = self._drafts, self._resources.slots[slot]
        token_R = self._resources.state.token_R
        sample = self._resources.graphs.switch(
            drafts.choice, make_sample, [(slot, each.tokens, *shape) for each in self._layouts]
        )

        def work() -> None:
            sample()
            drafts.settle(buffers, drafts.num_rows, token_R)

        return work


# ---------------------------------------------------------------- megakernel drafts


class DraftSnapshot:
    """Row state before a launch, to restore after a timeout."""

    def __init__(self, drafts: DraftState, state: RowTensors) -> None:
        self._drafts, self._state = drafts, state
        self._payload_R2 = torch.zeros_like(state.payload_R2)
        self._position_R = torch.zeros_like(drafts.position_R)
        self._descriptor_R4 = torch.zeros_like(drafts.descriptor_R4)

    def take(self) -> None:
        self._payload_R2.copy_(self._state.payload_R2)
        self._position_R.copy_(self._drafts.position_R)
        self._descriptor_R4.copy_(self._drafts.descriptor_R4)

    def restore(self, rows: Sequence[int], ring: TokenRing) -> None:
        """Restore a launch's rows to the last step that the ring counts.

        Some rows may already have verified the drafts of the step after it.
        """
        drafts, state, done = self._drafts, self._state, int(ring.words[DONE])
        names = "count", "proposed", "descriptor", "payload"
        count_SB, proposed_SB, learnt_SB4, payload_SB2 = (ring.fields[name] for name in names)
        first = 0  # the row's first token of the last step
        for index, row in enumerate(rows):
            if row == drafts.scratch_row:
                continue
            position = int(self._position_R[row]) + int(count_SB[:done, index].sum())
            learnt_4 = learnt_SB4[done - 1, index] if done else self._descriptor_R4[row]
            drafts.descriptor_R4[row] = learnt_4.to(drafts.descriptor_R4.device)
            drafts.position_R[row] = position
            drafts.tokens_RC[row, position + 1 :] = UNKNOWN
            state.token_R[row] = drafts.tokens_RC[row, position].clamp(min=0)
            state.payload_R2[row] = self._payload_R2[row]
            if done and (count := int(count_SB[done - 1, index])):
                payload_2 = payload_SB2[done - 1, first + count - 1]
                state.payload_R2[row] = payload_2.to(state.payload_R2.device)
                first += 1 + int(proposed_SB[done - 1, index])


class DraftLaunches:
    """Drafting state around megakernel launches: first tokens before, rows' state after."""

    def __init__(self, resources: Resources, rings: Sequence[TokenRing]) -> None:
        drafts = resources.state.drafts
        assert drafts is not None, "rows draft with speculation alone"
        kernels, proposer = drafts.operations, drafts.proposer
        assert isinstance(kernels, DraftKernels), "drafts need kernels on a GPU"
        assert isinstance(proposer, LookupKernel), "the megakernel drafts by lookup"
        self._resources, self._rings, self._drafts = resources, rings, drafts
        self._before = DraftSnapshot(drafts, resources.state)
        self._tensors = [
            MegakernelDrafts(
                staged=slot.staged.device,
                state=drafts,
                rules=kernels.rules,
                seconds_P=kernels.seconds_P,
                outputs=slot.outputs.device,
                ring=ring.fields,
                lengths=proposer.lengths,
            )
            for slot, ring in zip(resources.slots, rings, strict=True)
        ]

    def begin(self, slot: int) -> MegakernelDrafts:
        """Enqueue block sizes, proposals and token placement of the first step."""
        self._resources.graphs.run(self._begin_work, slot)
        return self._tensors[slot]

    def restore(self, slot: int) -> None:
        """Restore the rows of the slot's latest launch, which ended by a timeout."""
        rows = self._resources.slots[slot].staged.device["scheduled_row"].tolist()
        self._before.restore(rows, self._rings[slot])

    def _begin_work(self, slot: int) -> Work:
        drafts, buffers = self._drafts, self._resources.slots[slot]
        table_RM = self._resources.state.page_table_RM

        def work() -> None:
            self._before.take()
            drafts.allot(buffers, table_RM)
            drafts.propose(buffers, table_RM, drafts.max_block)
            drafts.place(buffers)

        return work
