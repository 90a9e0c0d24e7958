"""The inputs of a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from legato_engine.kernels.decode_loop import NOT_BEHIND
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.passes import bucket_for, stage_step
from legato_engine.runtime.preparation import Changes
from legato_engine.runtime.request_descriptors import NO_DRAFTS, UNDER_PRESSURE
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.sequence import Sequence as EngineSequence


class StepStaging:
    """Fills the host sides of slots."""

    def __init__(self, resources: Resources) -> None:
        state = resources.state
        self._drafts = state.drafts
        self._scratch_row = state.scratch_row
        self._max_pages = state.page_table_RM.shape[1]
        self._buckets = resources.buckets
        self._page_size = resources.kv.page_size

    def bucket(self, num_tokens: int) -> int:
        return bucket_for(self._buckets, num_tokens)

    def padding(self, slot: DecodeSlot) -> None:
        rows = ("row", "source", "sample_row")
        for field in (*rows, "scheduled_row") if slot.speculates else rows:
            slot.staged.host[field].fill(self._scratch_row)
        slot.prompt.host["row"].fill(self._scratch_row)
        slot.behind.host["index"].fill(NOT_BEHIND)
        for staged in (
            (slot.grown.host, slot.staged.host) if slot.speculates else (slot.grown.host,)
        ):
            staged["entry"].fill(self._scratch_row * self._max_pages)

    def decode(self, slot: DecodeSlot, plan: Plan) -> int:
        """Stage a decode, and with speculation the pages that begin in a single step; return the
        bucket.

        With speculation it is the bucket of the most tokens that the device may choose.
        """
        rows = plan.rows
        if self._drafts is not None:
            return self._drafting_rows(slot, plan)
        staged, bucket = slot.staged.host, self.bucket(len(rows))
        stage_step(slot, rows, bucket, self._scratch_row)
        staged["sample_row"][:bucket] = staged["row"][:bucket]
        np.add(staged["position"][:bucket], 1, out=staged["sample_position"][:bucket])
        return bucket

    def changes(self, slot: DecodeSlot, plan: Plan) -> Changes:
        """Stage what a launch changes besides: pages that begin, but for single steps with
        speculation, and where decodes are in the loop before it.
        """
        drafts, decodes = self._drafts is not None, plan.decodes
        grown: Sequence[tuple[EngineSequence, int]] = ()
        if not drafts:
            grown = self._begun(decodes, plan.num_steps)
        elif plan.loops or plan.kind is not LaunchKind.DECODE:
            grown = self._unstaged(decodes)
        if grown:
            self._stage_grown(slot.grown.host, grown)
        if plan.behind:
            slot.behind.host["index"].fill(NOT_BEHIND)
            slot.behind.host["index"][: len(plan.behind)] = plan.behind
        return Changes(bool(grown), bool(plan.behind))

    def _begun(
        self, rows: Sequence[ScheduledSequence], num_steps: int
    ) -> Sequence[tuple[EngineSequence, int]]:
        size = self._page_size
        if num_steps == 1:
            rows = [row for row in rows if (row.position + row.slack) % size == 0]
        return [(row.sequence, page) for row in rows for page in row.new_pages(size, num_steps)]

    def _stage_grown(
        self, staged: Mapping[str, np.ndarray], grown: Sequence[tuple[EngineSequence, int]]
    ) -> None:
        staged["entry"].fill(self._scratch_row * self._max_pages)
        staged["page"].fill(0)
        for index, (sequence, page) in enumerate(grown):
            staged["entry"][index] = sequence.row * self._max_pages + page
            staged["page"][index] = sequence.pages.ids[page]

    def constraints(self, slot: DecodeSlot, plan: Plan, constraints: Sequence[int]) -> int:
        """Stage a constraint for each row; return the most tokens that are sampled."""
        slot.constraint.host["constraint"][: len(constraints)] = constraints
        slot.constraint.host["after"][: len(plan.after)] = plan.after
        if self._drafts is None:
            return len(constraints)
        return sum(1 + row.num_drafts for row in plan.sampled_rows)

    def _drafting_rows(self, slot: DecodeSlot, plan: Plan) -> int:
        """The device chooses the tokens and knows their positions."""
        staged, rows = slot.staged.host, plan.rows
        count, most = len(rows), 0
        room_S = []
        for row in rows:
            most += 1 + row.num_drafts
            room_S.append(row.num_drafts if row.sequence.may_draft else NO_DRAFTS)
        staged["scheduled_row"][:count] = [row.sequence.row for row in rows]
        staged["scheduled_row"][count:] = self._scratch_row
        staged["room"][:count] = room_S
        staged["reach"][:count] = [row.reach(plan.num_steps) for row in rows]
        staged["control"][0] = UNDER_PRESSURE if plan.under_pressure else 0
        self._stage_grown(staged, () if plan.loops else self._unstaged(rows))
        return self.bucket(most)

    def _unstaged(self, rows: Sequence[ScheduledSequence]) -> Sequence[tuple[EngineSequence, int]]:
        """The indices of pages that the device does not have yet."""
        unstaged: list[tuple[EngineSequence, int]] = []
        for row in rows:
            pages = row.sequence.pages
            count = len(pages.ids)
            if count > pages.num_staged:
                unstaged += [(row.sequence, page) for page in range(pages.num_staged, count)]
                pages.num_staged = count
        return unstaged
