"""Reference implementation of speculation, row by row, by the policies themselves.

It runs on the CPU, and is what the kernels of a GPU are compared with. Shape legend as in
`draft_state`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from legato_engine.runtime.descriptors import (
    DESCRIPTOR,
    EXACT,
    KV_PRESSURE,
    STARTS,
    UNDER_PRESSURE,
    VERIFIED,
)
from legato_engine.sequence import Descriptor
from legato_engine.speculation import PROBE_EVERY, BlockPolicy, TokenBudgetPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.accelerated import DraftTensors

_GROUP = 8
_NUM_FIELDS = len(Descriptor._fields)


@dataclasses.dataclass(slots=True)
class _Request:
    """A descriptor as a policy sees it."""

    accepted_weight: float
    tried_weight: float
    ema_acceptance_rate: float
    current_block_size: int
    idle_steps: int
    flags: int
    num_left: int = 1

    @property
    def under_pressure(self) -> bool:
        return bool(self.flags & KV_PRESSURE)

    @property
    def block_size_history(self) -> list[int]:
        """Return the block sizes that policies read: whether any exist and the last ones."""
        if not self.flags & VERIFIED:
            return []
        return [0] * self.idle_steps if self.idle_steps else [1]


class ReferenceDrafts:
    """The operations of `kernels.cuda.drafting.DraftKernels`."""

    def __init__(self, policy: BlockPolicy, vocab_size: int) -> None:
        self._policy = policy
        self._vocab_size = vocab_size

    def set_costs(self, policy: TokenBudgetPolicy) -> None:
        self._policy = policy

    def allot(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        page_table_RM: torch.Tensor,
        proposal_K: torch.Tensor,
    ) -> None:
        page_table_RM.view(-1)[staged["entry"]] = staged["page"]
        flags, proposal = staged["control"].tolist()
        rows, rooms = (staged[name].tolist() for name in ("scheduled_row", "room"))
        blocks = [0] * len(rows)
        if flags & EXACT:
            blocks = [max(room, 0) for room in rooms]
        else:
            self._allot(state, rows, rooms, blocks, under_pressure=bool(flags & UNDER_PRESSURE))
            proposal = int(proposal_K[max(blocks)])
        state.block_S.copy_(torch.tensor(blocks))
        state.proposal.fill_(proposal)

    def _allot(
        self,
        state: DraftTensors,
        rows: list[int],
        rooms: list[int],
        blocks: list[int],
        *,
        under_pressure: bool,
    ) -> None:
        self._load_counts(state)
        requests: dict[int, _Request] = {}
        for index, (row, room) in enumerate(zip(rows, rooms, strict=True)):
            left = int(state.limit_R[row] - state.position_R[row])
            if row == state.scratch_row or room < 0 or left < 0:
                continue
            request = _load(state, row)
            request.num_left = min(left, room) + 1
            request.flags &= ~KV_PRESSURE
            request.flags |= KV_PRESSURE if under_pressure else 0
            if request.flags & STARTS:
                self._policy.begin(request)
                request.flags &= ~STARTS
            requests[index] = request
        if requests:
            self._policy.allot(list(requests.values()))
        for index, request in requests.items():
            blocks[index] = min(request.current_block_size, request.num_left - 1)
            _store(state, rows[index], request)

    def place(
        self, state: DraftTensors, staged: Mapping[str, torch.Tensor], choice_B3: torch.Tensor
    ) -> None:
        rows, blocks = staged["scheduled_row"].tolist(), state.block_S.tolist()
        max_tokens, scratch = len(staged["row"]), state.scratch_row
        size = self._vocab_size
        exact = bool(int(staged["control"][0]) & EXACT)
        tokens: list[tuple[int, ...]] = []
        starts, counts, groups = [], [], 0
        for index, (row, block) in enumerate(zip(rows, blocks, strict=True)):
            first, last = int(state.position_R[row]), int(state.limit_R[row])
            left = last - first
            drafted = state.draft_RK[row, : max(0, min(block, left))].tolist()
            known = (
                [0] * len(drafted) if exact else takewhile(lambda draft: 0 <= draft < size, drafted)
            )
            fed = [0, *known] if row != scratch and left >= 0 else []
            starts.append(len(tokens))
            counts.append(len(fed))
            groups += -(-len(fed) // _GROUP)
            for lane, token in enumerate(fed):
                position = first + lane
                source = -1 if lane else row
                places = (position, first, row, position + 1)
                tokens.append((row, lane, source, token, *places, index))
        choice = choice_B3[len(tokens), min(max(groups, 1), choice_B3.shape[1]) - 1]
        padding = (scratch, 0, -1, 0, 0, 1, scratch, 0, 0)
        tokens += [padding] * (max_tokens - len(tokens))
        inputs = ("row", "draft_index", "source", "token", "position", "fresh")
        names = (*inputs, "sample_row", "sample_position", "scheduled")
        for name, values in zip(names, zip(*tokens, strict=True), strict=True):
            staged[name].copy_(torch.tensor(values))
        staged["start"].copy_(torch.tensor(starts))
        staged["fed"].copy_(torch.tensor(counts))
        state.choice.copy_(choice)

    def settle(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        sampled_B: torch.Tensor,
        hidden_BD: torch.Tensor,
        token_R: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        num_rows: int,
    ) -> None:
        names = ("scheduled_row", "room", "start", "fed")
        scheduled = zip(*(staged[name][:num_rows].tolist() for name in names), strict=True)
        sampled = sampled_B.tolist()
        self._load_counts(state)
        for index, (row, room, start, fed) in enumerate(scheduled):
            num_accepted = 0
            if row != state.scratch_row and fed:
                drafted = state.draft_RK[row, : fed - 1].tolist()
                pairs = zip(sampled[start:], drafted, strict=False)
                num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                newest = start + num_accepted
                positions = staged["sample_position"][start : newest + 1]
                state.tokens_RC[row, positions] = sampled_B[start : newest + 1]
                state.position_R[row] = positions[-1]
                state.hidden_RD[row] = hidden_BD[newest]
                token_R[row] = max(sampled[newest], 0)
                if room >= 0:
                    self._learn(state, row, num_accepted, fed - 1)
            is_fed = row != state.scratch_row and fed > 0
            outputs["count"][index] = num_accepted + 1 if is_fed else 0
            outputs["proposed"][index] = fed - 1 if is_fed else 0
            outputs["descriptor"][index] = state.descriptor_R4[row]
        if isinstance(self._policy, TokenBudgetPolicy):
            counts = self._policy.overall
            state.overall[0], state.overall[1] = counts.accepted_weight, counts.tried_weight

    def _learn(self, state: DraftTensors, row: int, accepted: int, proposed: int) -> None:
        request = _load(state, row)
        request.idle_steps = 0 if proposed else min(request.idle_steps + 1, PROBE_EVERY)
        request.flags |= VERIFIED
        self._policy.update(request, accepted, proposed)
        _store(state, row, request)

    def _load_counts(self, state: DraftTensors) -> None:
        if isinstance(self._policy, TokenBudgetPolicy):
            counts = self._policy.overall
            counts.accepted_weight, counts.tried_weight = state.overall.tolist()


def _load(state: DraftTensors, row: int) -> _Request:
    return _Request(*state.descriptor_R4[row].cpu().numpy().view(DESCRIPTOR)[0].tolist())


def _store(state: DraftTensors, row: int, request: _Request) -> None:
    words = state.descriptor_R4[row].cpu().numpy().copy()
    fields = dataclasses.astuple(request)[:_NUM_FIELDS]
    words.view(DESCRIPTOR)[0] = fields
    state.descriptor_R4[row] = torch.from_numpy(words)
