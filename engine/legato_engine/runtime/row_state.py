"""Device state of every running sequence between launches.

Sampling writes a row's token, and the next forward reads it without the host. A prefill writes a
sequence's constants: adapter slot, sampling and first pages. A later page is written by the first
launch that uses it.

Shape legend: R rows (the last is scratch, for padding), M pages, K prompts of a launch.
"""

from __future__ import annotations

import torch

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState


class RowState:
    """Tensors indexed by `Sequence.row`; `drafts` has those of speculation."""

    def __init__(
        self, num_rows: int, max_pages: int, device: torch.device, drafts: DraftState | None = None
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

    def admit(self, slot: DecodeSlot) -> None:
        """Take sequences' constants from their staged prefill, on the compute stream.

        Unused prompt indices have the scratch row. Can be captured.
        """
        staged = slot.prompt.device
        row_K = staged["row"]
        self.page_table_RM.index_copy_(0, row_K, staged["pages"])
        self.adapter_slot_R.index_copy_(0, row_K, staged["adapter_slot"])
        self.seed_R.index_copy_(0, row_K, staged["seed"])
        self.top_k_R.index_copy_(0, row_K, staged["top_k"])
        self.temperature_R.index_copy_(0, row_K, staged["temperature"])
        self.top_p_R.index_copy_(0, row_K, staged["top_p"])
        if self.drafts is not None:
            self.drafts.admit(slot)

    def grow(self, slot: DecodeSlot) -> None:
        """Add the slot's staged pages to the table, on the compute stream. Can be captured."""
        staged = slot.grown.device
        self.page_table_RM.view(-1).index_copy_(0, staged["entry"], staged["page"])
