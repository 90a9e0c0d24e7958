"""The inputs of a decode step, written to a slot's host side before their upload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.passes import bucket_for, stage_step
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import ScheduledSequence


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
        """Return the smallest batch size that has room for so many tokens."""
        return bucket_for(self._buckets, num_tokens)

    def padding(self, slot: DecodeSlot) -> None:
        """Assign every entry to the scratch row."""
        for field in ("row", "source", "sample_row"):
            slot.staged.host[field].fill(self._scratch_row)
        slot.prompt.host["row"].fill(self._scratch_row)
        slot.grown.host["entry"].fill(self._scratch_row * self._max_pages)

    def rows(self, slot: DecodeSlot, rows: Sequence[ScheduledSequence]) -> int:
        """Stage each row's tokens and padding; return the bucket."""
        if self._drafts is not None:
            return self._drafted_rows(slot, rows)
        staged, bucket = slot.staged.host, self.bucket(len(rows))
        stage_step(slot, rows, bucket, self._scratch_row)
        staged["sample_row"][:bucket] = staged["row"][:bucket]
        np.add(staged["position"][:bucket], 1, out=staged["sample_position"][:bucket])
        return bucket

    def grown(self, slot: DecodeSlot, rows: Sequence[ScheduledSequence]) -> bool:
        """Stage the pages that these decodes are the first to use; return whether there are any."""
        size = self._page_size
        if self._drafts is None:
            rows = [row for row in rows if row.position % size == 0]
        grown = [(row.sequence, page) for row in rows for page in row.new_pages(size)]
        if not grown:
            return False
        staged = slot.grown.host
        staged["entry"].fill(self._scratch_row * self._max_pages)
        staged["page"].fill(0)
        for index, (sequence, page) in enumerate(grown):
            staged["entry"][index] = sequence.row * self._max_pages + page
            staged["page"][index] = sequence.pages.ids[page]
        return True

    def constraints(
        self, slot: DecodeSlot, rows: Sequence[ScheduledSequence], constraints: Sequence[int]
    ) -> int:
        """Stage a row's constraint for each of its tokens; return the number of tokens."""
        if self._drafts is not None:
            constraints = [
                constraint
                for row, constraint in zip(rows, constraints, strict=True)
                for _ in range(num_sampled(row))
            ]
        slot.constraint.host["constraint"][: len(constraints)] = constraints
        return len(constraints)

    def _drafted_rows(self, slot: DecodeSlot, rows: Sequence[ScheduledSequence]) -> int:
        """Stage rows and draft indices; the device knows the positions."""
        staged = slot.staged.host
        row_B = [row.sequence.row for row in rows for _ in range(num_sampled(row))]
        draft_index_B = [index for row in rows for index in range(num_sampled(row))]
        assert self._drafts is not None
        num_drafts, max_block = max(draft_index_B), self._drafts.max_block
        assert num_drafts <= max_block, f"{num_drafts} draft tokens of a row, at most {max_block}"
        bucket, slot.num_drafts = self.bucket(len(row_B)), num_drafts
        staged["row"][:bucket] = self._scratch_row
        staged["row"][: len(row_B)] = row_B
        staged["draft_index"][:bucket] = 0
        staged["draft_index"][: len(row_B)] = draft_index_B
        return bucket


def num_sampled(row: ScheduledSequence) -> int:
    """Count a row's tokens that are sampled from; of a prefill only its last token is."""
    return 1 + row.num_drafts
