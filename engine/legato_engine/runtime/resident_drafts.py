"""Launches of the resident kernel whose rows draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.accelerated import DraftKernels, LookupKernel, RowTensors
from legato_engine.kernels.decode_loop import DONE
from legato_engine.kernels.resident_launch import ResidentDrafts
from legato_engine.runtime.draft_state import DraftState
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.token_ring import TokenRing
from legato_engine.speculative.proposer import UNKNOWN


class DraftSnapshot:
    """Where rows were before a launch, for one that gives up a wait."""

    def __init__(self, drafts: DraftState, state: RowTensors) -> None:
        self._drafts, self._state = drafts, state
        self._payload_R2 = torch.zeros_like(state.payload_R2)
        self._position_R = torch.zeros_like(drafts.position_R)
        self._descriptor_R4 = torch.zeros_like(drafts.descriptor_R4)

    def take(self) -> None:
        """Can be captured."""
        self._payload_R2.copy_(self._state.payload_R2)
        self._position_R.copy_(self._drafts.position_R)
        self._descriptor_R4.copy_(self._drafts.descriptor_R4)

    def restore(self, rows: Sequence[int], ring: TokenRing) -> None:
        """Put a launch's rows where the steps that the ring counts have left them: some may have
        been settled in the step after those.
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
    """The kernel finds the tokens of a launch's first step placed, and leaves its rows' state."""

    def __init__(self, resources: Resources, rings: Sequence[TokenRing]) -> None:
        drafts = resources.state.drafts
        assert drafts is not None, "rows draft with speculation alone"
        kernels, proposer = drafts.operations, drafts.proposer
        assert isinstance(kernels, DraftKernels), "a GPU has kernels"
        assert isinstance(proposer, LookupKernel), "the kernel looks up"
        self._resources, self._rings, self._drafts = resources, rings, drafts
        self._before = DraftSnapshot(drafts, resources.state)
        self._tensors = [
            ResidentDrafts(
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

    def begin(self, slot: int) -> ResidentDrafts:
        """Enqueue block sizes, proposals and tokens of the first step."""
        self._resources.graphs.run(self._begin_work, slot)
        return self._tensors[slot]

    def restore(self, slot: int) -> None:
        """After a launch that gave up a wait, the latest one."""
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
