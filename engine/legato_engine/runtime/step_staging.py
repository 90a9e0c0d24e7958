"""What a launch's rows feed, written to a slot's host side before its copies are enqueued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.passes import bucket_for, stage_step
from legato_engine.runtime.row_state import RowState
from legato_engine.scheduler.launch import Row


class StepStaging:
    """Fills slots for rows of `state`, whose steps have the sizes `buckets`, in tokens, rising."""

    def __init__(self, state: RowState, buckets: Sequence[int], page_size: int) -> None:
        self._drafts = state.drafts
        self._scratch_row = state.scratch_row
        self._max_pages = state.page_table_RM.shape[1]
        self._buckets = buckets
        self._page_size = page_size

    def bucket(self, num_tokens: int) -> int:
        """The size of the step that has room for so many."""
        return bucket_for(self._buckets, num_tokens)

    def padding(self, slot: DecodeSlot) -> None:
        """Nothing at all: every place is the scratch row's."""
        for field in ("row", "source", "sample_row"):
            slot.staged.host[field].fill(self._scratch_row)
        slot.prompt.host["row"].fill(self._scratch_row)
        slot.grown.host["entry"].fill(self._scratch_row * self._max_pages)

    def rows(self, slot: DecodeSlot, rows: Sequence[Row]) -> int:
        """What each row feeds, its last token or its lanes, and padding up to the bucket."""
        if self._drafts is not None:
            return self._lanes(slot, rows)
        staged, bucket = slot.staged.host, self.bucket(len(rows))
        stage_step(slot, rows, bucket, self._scratch_row)
        staged["sample_row"][:bucket] = staged["row"][:bucket]
        np.add(staged["position"][:bucket], 1, out=staged["sample_position"][:bucket])
        return bucket

    def grown(self, slot: DecodeSlot, rows: Sequence[Row]) -> bool:
        """The pages that these decodes are the first to name; whether there are any."""
        size = self._page_size
        if self._drafts is None:
            rows = [row for row in rows if row.position % size == 0]
        grown = [(row.sequence, page) for row in rows for page in row.new_pages(size)]
        if not grown:
            return False
        staged = slot.grown.host
        staged["entry"].fill(self._scratch_row * self._max_pages)
        staged["page"].fill(0)
        for place, (sequence, page) in enumerate(grown):
            staged["entry"][place] = sequence.row * self._max_pages + page
            staged["page"][place] = sequence.page_ids[page]
        return True

    def constraints(self, slot: DecodeSlot, rows: Sequence[Row], constraints: Sequence[int]) -> int:
        """A row's constraint for each of its tokens; how many there are."""
        if self._drafts is not None:
            constraints = [
                constraint
                for row, constraint in zip(rows, constraints, strict=True)
                for _ in range(num_sampled(row))
            ]
        slot.constraint.host["constraint"][: len(constraints)] = constraints
        return len(constraints)

    def _lanes(self, slot: DecodeSlot, rows: Sequence[Row]) -> int:
        """Which lanes there are; the device knows where they stand."""
        staged = slot.staged.host
        row_B = [row.sequence.row for row in rows for _ in range(num_sampled(row))]
        draft_index_B = [lane for row in rows for lane in range(num_sampled(row))]
        assert self._drafts is not None
        assert max(draft_index_B) <= self._drafts.max_block, (
            "a row proposes more than there is room for"
        )
        bucket, slot.num_drafts = self.bucket(len(row_B)), max(draft_index_B)
        staged["row"][:bucket] = self._scratch_row
        staged["row"][: len(row_B)] = row_B
        staged["draft_index"][:bucket] = 0
        staged["draft_index"][: len(row_B)] = draft_index_B
        return bucket


def num_sampled(row: Row) -> int:
    """Tokens of a row that are sampled from; of a prefill's only the last is."""
    return 1 + row.num_drafts
