"""Decode slots and the device state that launches share.

They have fixed addresses. A launch owns its slot from staging until the commit that reads
`outputs.host`.

Shape legend: R tokens of a full batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from legato_engine.device.base import Device, Stream
from legato_engine.kernels.accelerated import DraftKernels
from legato_engine.kernels.proposer import UNKNOWN, Proposer, RowHistory
from legato_engine.layers.lora import AdaptedRows, AdapterBank
from legato_engine.models.base import Model
from legato_engine.models.paged_attention import KVCache
from legato_engine.runtime.buffers import Fields, StagingBuffer, StagingRoom, size_of
from legato_engine.runtime.descriptors import NO_DRAFTS, WORDS
from legato_engine.runtime.graphs import GraphRunner
from legato_engine.runtime.kv_pool import doubling
from legato_engine.runtime.reference_drafts import ReferenceDrafts
from legato_engine.scheduler.batch import ScheduledSequence
from legato_engine.speculation import AcceptanceCounts, BlockPolicy, TokenBudgetPolicy

MAX_PASSES = 14
"""Host sides of the staged steps.

A prompt of more steps (448 tokens, 32 in a step) is left to the matrix library, which is faster
there (2,000 tokens as steps: 87 ms instead of 21). It rounds otherwise, and where its passes begin
depends on what is cached.
"""

SHARED_PASSES = 4
"""Steps of a shared launch; its decodes wait for all of them."""

MAX_ALTERNATIVES = 20
"""Alternatives to a token that a launch computes."""

STEP_FIELDS = (
    "row",  # of the page table and the row state
    "source",  # the row whose newest token is fed; -1: the staged `token` and `payload`
    "position",
    "fresh",  # the row's first position that this step writes; above `position`: padding
    "sample_row",  # of the token sampled from it, or the scratch row
    "sample_position",
)
"""Fields of each token of a step. With speculation the device stages them for a decode."""

DRAFT_FIELDS = ("draft_index", "scheduled")
"""More fields of a token with speculation: 0 for a row's newest token, and the row's index in the
launch.
"""

SCHEDULED_FIELDS = ("scheduled_row", "room", "reach", "start", "fed", "num_forced")
"""Fields of each row of a launch with speculation: the row of the state, or the scratch row; the
most draft tokens that it has pages for, or `NO_DRAFTS`; in a loop, the end of the positions that it
may write; its first token and their number, which the device stages for a decode; the number of
its `forced` tokens.
"""


class DecodeSlot:
    """Buffers for one launch of up to `max_rows` tokens, or of up to `max_prompts` prompts.

    Prompts have up to `max_prompt` tokens together. All but the first of `max_images` computed
    images are additional prompts.

    Beside each other, so that neighbours are uploaded at once, are `prompt`, `grown`, `behind` and
    `staged`.

    - `staged`: `STEP_FIELDS` of each token.
    - `behind`: the index of each token's row in the loop before, or `NOT_BEHIND`.
    - `grown`: entries of the page table (row * pages of a row + index) and their new pages; with
      speculation, of a loop.
    - `constraint`: of each row and, for a loop, `Plan.after`; of a row with forced tokens, those of
      each of them first. With speculation `first` is the index of a row's first constraint.
    - `masks`: of each row with a grammar, its constraint (`base`) and the bits of allowed tokens.
    - `prompt`: adjacent tokens of all prompts and, by prompt index, its row's constants; `copied`
      is a shared page and the copy of it (0 and 0: none).
    - `outputs`: by token.
    - `alternatives`: of each token, the likeliest in falling order, if a row of the launch wants
      them.

    With speculation a prompt also has its `history` (ids by position), `limit` (the last position
    to feed) and `descriptor`. A launch stages `SCHEDULED_FIELDS`, the pages that begin in it, and
    `control`: its flags, and the proposal of an `EXACT` one. By row of the launch, its outputs have
    counts of returned (`count`) and of fed draft tokens (`proposed`), and the row's `descriptor`.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_pages: int,
        max_prompt: int,
        max_prompts: int = 1,
        max_images: int = 1,
        width: int,
        vocab_size: int,
        dtype: torch.dtype,
        max_drafting: int = 0,
        max_block: int = 0,
        max_grown: int = 0,
    ) -> None:
        """Allocate a slot, with speculation for up to `max_drafting` rows of `max_block` drafts.

        `max_grown` new pages fit, with speculation in a loop (0: one a row).
        """
        on = device.torch_device
        rows = ((max_rows,), torch.int64)
        self.speculates = speculates = max_drafting > 0
        self.max_prompts, self.max_images = max_prompts, max_images
        constraint: Fields = {"constraint": rows, "after": rows}
        if speculates:
            constraint["first"] = ((max_drafting,), torch.int64)
        self.constraint = StagingBuffer(device, constraint)
        words = ((max_rows, -(-vocab_size // 32)), torch.int32)
        self.masks = StagingBuffer(device, {"base": rows, "words": words})
        num_prompts = max_prompts + max_images - 1
        begun = ((max_grown or max_rows,), torch.int64)
        prompt = _prompt_fields(num_prompts, max_prompt, max_pages, speculates=speculates)
        grown: Fields = {"entry": begun, "page": begun}
        behind: Fields = {"index": rows}
        staged = _step_fields(max_rows, max_drafting, max_block)
        room = StagingRoom(device, sum(map(size_of, (prompt, grown, behind, staged))))
        self.prompt = StagingBuffer(device, prompt, room=room)
        self.grown = StagingBuffer(device, grown, room=room)
        self.behind = StagingBuffer(device, behind, room=room)
        self.staged = StagingBuffer(device, staged, room=room, copies=MAX_PASSES)
        self.outputs = StagingBuffer(device, _output_fields(max_rows, max_drafting))
        places = (max_rows, min(MAX_ALTERNATIVES, vocab_size))
        self.alternatives = StagingBuffer(
            device, {"token": (places, torch.int64), "logprob": (places, torch.float32)}
        )
        self.hidden_RD = torch.zeros(max_rows, width, dtype=dtype, device=on)
        self.logits_RV = torch.zeros(max_rows, vocab_size, device=on)
        self.tokens_R = self.outputs.device["token"]
        self.payload_R2 = self.outputs.device["payload"]  # stale unless a row has payloads
        self.certainty_R2 = self.outputs.device["certainty"]  # likewise
        self.logprob_R = self.outputs.device["logprob"]  # stale unless a row wants it
        self.entry_R = self.staged.device["scheduled"] if speculates else None

    def constraints(self, batch: int) -> torch.Tensor:
        """Each token's constraint; with speculation those of rows, by their entries, are staged."""
        constraint_S = self.constraint.device["constraint"]
        return constraint_S[:batch] if self.entry_R is None else constraint_S[self.entry_R[:batch]]


def _step_fields(max_rows: int, max_drafting: int, max_block: int) -> Fields:
    rows = ((max_rows,), torch.int64)
    fields: Fields = dict.fromkeys(STEP_FIELDS, rows)
    if max_drafting:
        fields |= dict.fromkeys((*DRAFT_FIELDS, "entry", "page"), rows)
        fields |= dict.fromkeys(SCHEDULED_FIELDS, ((max_drafting,), torch.int64))
        fields["forced"] = ((max_drafting, max_block), torch.int64)
        fields["control"] = ((2,), torch.int64)
    return fields | {"token": rows, "payload": ((max_rows, 2), torch.float32)}


def _prompt_fields(
    num_prompts: int, max_prompt: int, max_pages: int, *, speculates: bool
) -> Fields:
    one, pages = ((num_prompts,), torch.int64), ((num_prompts, max_pages), torch.int64)
    number = ((num_prompts,), torch.float32)
    fields: Fields = {
        "row": one,
        "token": ((max_prompt,), torch.int64),
        "payload": ((max_prompt, 2), torch.float32),
        "prefix_pages": pages,
        "pages": pages,
        "copied": ((num_prompts, 2), torch.int64),
        **dict.fromkeys(("adapter_slot", "seed", "top_k", "rope_offset"), one),
        **dict.fromkeys(("temperature", "top_p"), number),
    }
    if speculates:
        fields["history"] = ((num_prompts, max_prompt + 1), torch.int64)
        fields["limit"] = one
        fields["descriptor"] = ((num_prompts, WORDS), torch.int64)
    return fields


def _output_fields(max_rows: int, max_drafting: int) -> Fields:
    pairs = ((max_rows, 2), torch.float32)
    fields: Fields = {
        "token": ((max_rows,), torch.int64),
        "payload": pairs,
        "certainty": pairs,
        "logprob": ((max_rows,), torch.float32),
    }
    if max_drafting:
        fields |= dict.fromkeys(("count", "proposed"), ((max_drafting,), torch.int64))
        fields["descriptor"] = ((max_drafting, WORDS), torch.int64)
    return fields


# ---------------------------------------------------------------- draft state

# A row feeds its newest token and up to K draft tokens after it. Only the device knows how many,
# and at which positions, because the previous launch may not be read back yet. The host stages the
# rows and the most draft tokens that each has pages for.
#
# Shape legend: R rows of the state, S rows of a launch, B tokens of its largest batch, K draft
# tokens, C positions, D width, M pages of a row.

_MAX_GROUPS = 3


class StepLayout(NamedTuple):
    """A batch that a forward is prepared for: `groups` of adjacent tokens of one row are fast."""

    tokens: int
    groups: int


class DraftState:
    """Tensors by row, and the work on them around a forward.

    `allot`, `propose` and `place` run before a decode's forward, `settle` after every sampling. If
    rows have forced tokens, `force` runs before `place` and `index_constraints` before the
    sampling. All can be captured.
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
        self.blocks = doubling(1, block) if proposer.sequential else (block,)
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
        self.operations: DraftKernels | ReferenceDrafts = ReferenceDrafts(policy, vocab_size)
        if device.type == "cuda":
            self.operations = DraftKernels(
                policy, num_rows=num_rows, vocab_size=vocab_size, device=device
            )
        self.forget()

    # ------------------------------------------------------------ set-up

    def lay_out(self, layouts: Sequence[StepLayout], most_tokens: int) -> None:
        """Let `choice` be the index of the smallest of these batches, ascending in tokens."""
        table = [
            [_choice(layouts, tokens, groups) for groups in range(1, _MAX_GROUPS + 1)]
            for tokens in range(most_tokens + 1)
        ]
        on = self.choice.device
        self._choice_B3 = torch.tensor(table, dtype=torch.int32, device=on)

    def set_costs(self, policy: TokenBudgetPolicy) -> None:
        """Choose block sizes by its costs; nothing may be in flight."""
        self.operations.set_costs(policy)

    def proposal_for(self, count: int) -> int:
        """Return the index of the shortest proposal with at least `count` draft tokens.

        The last index stands for none.
        """
        if not count:
            return len(self.blocks)
        return next(index for index, block in enumerate(self.blocks) if block >= count)

    def forget(self) -> None:
        counts = AcceptanceCounts()
        self.overall[0], self.overall[1] = counts.accepted_weight, counts.tried_weight

    def set_calibration_rows(self, position: int, *, spare: int) -> None:
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

    def force(self, slot: DecodeSlot) -> None:
        """Draft the forced tokens of rows that have some; such rows draft no others."""
        staged = slot.staged.device
        row_S, num_forced_S = staged["scheduled_row"], staged["num_forced"]
        self.block_S.copy_(torch.maximum(self.block_S, num_forced_S))
        draft_SK = torch.where(num_forced_S[:, None] > 0, staged["forced"], self.draft_RK[row_S])
        self.draft_RK.index_copy_(0, row_S, draft_SK)

    def index_constraints(self, slot: DecodeSlot) -> None:
        """Give each of the tokens of a row with forced ones an entry of its own."""
        staged, first_S = slot.staged.device, slot.constraint.device["first"]
        entry_B = staged["scheduled"]
        is_forced_B = staged["num_forced"][entry_B] > 0
        entry_B.copy_(first_S[entry_B] + staged["draft_index"] * is_forced_B)

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


def _choice(layouts: Sequence[StepLayout], tokens: int, groups: int) -> int:
    """Return the index of a batch for `tokens` in `groups` (at least `_MAX_GROUPS`) groups."""
    fits = [index for index, each in enumerate(layouts) if each.tokens >= tokens]
    if not fits:
        return len(layouts) - 1  # never planned
    smallest = layouts[fits[0]].tokens
    same = [index for index in fits if layouts[index].tokens == smallest]
    enough = [index for index in same if layouts[index].groups >= groups]
    return min(enough or same, key=lambda index: layouts[index].groups)


# ---------------------------------------------------------------- row state

# Sampling writes a row's token, and the next forward reads it without the host. A prefill writes a
# sequence's constants and first pages; a later page is written by the first launch that uses it.
#
# Shape legend: R rows (the last is scratch, for padding), M pages, K prompts of a launch.


class RowState:
    """Tensors indexed by `Sequence.row`; rotary offsets only of a model with visual prompts."""

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        device: torch.device,
        drafts: DraftState | None = None,
        *,
        has_visual_prompts: bool = False,
    ) -> None:
        rows = num_rows + 1
        self.scratch_row = num_rows
        self.drafts = drafts
        self.token_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.payload_R2 = torch.zeros(rows, 2, device=device)
        self.page_table_RM = torch.zeros(rows, max_pages, dtype=torch.int64, device=device)
        self.adapter_slot_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seed_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_k_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature_R = torch.zeros(rows, device=device)
        self.top_p_R = torch.ones(rows, device=device)
        self.rope_offset_R: torch.Tensor | None = None
        if has_visual_prompts:
            self.rope_offset_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, slot: DecodeSlot) -> None:
        """Unused prompt indices have the scratch row. Can be captured."""
        staged = slot.prompt.device
        row_K = staged["row"]
        self.page_table_RM.index_copy_(0, row_K, staged["pages"])
        for name in ("adapter_slot", "seed", "top_k", "temperature", "top_p"):
            getattr(self, f"{name}_R").index_copy_(0, row_K, staged[name])
        if self.rope_offset_R is not None:
            self.rope_offset_R.index_copy_(0, row_K, staged["rope_offset"])
        if self.drafts is not None:
            self.drafts.admit(slot)

    def grow(self, slot: DecodeSlot) -> None:
        staged = slot.grown.device
        self.page_table_RM.view(-1).index_copy_(0, staged["entry"], staged["page"])


# ---------------------------------------------------------------- resources


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """The model, its device and all tensors at fixed addresses that launches read and write.

    Contents change only on the compute stream, except host sides of a slot, which its launch owns.

    Shape legend: C constraints, V vocabulary.
    """

    model: Model
    device: Device
    kv: KVCache
    state: RowState
    slots: tuple[DecodeSlot, ...]
    bank: AdapterBank | None  # None: no row has an adapter
    buckets: tuple[int, ...]  # tokens, ascending
    constraints_CV: torch.Tensor  # float32, added to logits; the last rows are grammars' masks
    successor_C2: torch.Tensor  # of `successor_table`
    graphs: GraphRunner
    max_image_bytes: int = 0  # of features that are kept for later visual prompts

    @property
    def compute(self) -> Stream:
        return self.device.compute

    @property
    def first_mask(self) -> int:
        """Return the constraint of a launch's first row with a grammar."""
        return len(self.model.constraints)

    @property
    def ranks(self) -> tuple[int, ...]:
        """0: without adapters."""
        return (0,) if self.bank is None else (0, *self.bank.ranks)

    def rank(self, adapter_rank: int) -> int:
        return 0 if self.bank is None else self.bank.bucket(adapter_rank)

    def write_adapter(self, row: ScheduledSequence) -> None:
        """Enqueue the copy of a row's adapter, if its slot does not have it yet."""
        adapter = row.sequence.inputs.adapter
        if row.work.write_adapter and adapter is not None:
            assert self.bank is not None, f"adapter {adapter.key} without an adapter bank"
            self.bank.write(row.sequence.adapter.slot, adapter.weights, self.compute)

    def adapters(self, slot_T: torch.Tensor, rank: int) -> AdaptedRows | None:
        if not rank:
            return None
        assert self.bank is not None, f"rank {rank} without an adapter bank"
        return self.bank.rows(slot_T, rank)
