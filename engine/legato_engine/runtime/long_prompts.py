"""Prompts of more tokens than steps are worth, in passes of one shape over the matrix library.

Each pass is captured once, reads its place from a cursor on the device and moves that on, so a
prompt is a copy and as many launches as it has passes, without allocations.

Shape legend: T tokens of a pass, M pages of a row.
"""

from __future__ import annotations

import bisect
from itertools import product

import torch

from legato_engine.models.capabilities import ChunkedPrefill
from legato_engine.models.paged_cache import Chunk
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.passes import ScheduledPrompt, stage_tokens
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.staging import StagingBuffer

CHUNK = 512
"""Tokens of a pass, the last of which is padded."""

_START, _LEFT, _FIRST = 0, 1, 2


class LongPrompts:
    """Runs the prompt of a launch that has no other; its last position's outputs are row 0's."""

    def __init__(self, resources: Resources, model: ChunkedPrefill) -> None:
        device = resources.device
        most = resources.model.max_context
        self._lengths = [*range(CHUNK, most, CHUNK), most]
        self._ranks = (0,) if resources.bank is None else (0, resources.bank.ranks[-1])
        self._resources = resources
        self._model = model
        self._offset_T = torch.arange(CHUNK, device=device.torch_device)
        self._staged = [
            StagingBuffer(
                device,
                {
                    "cursor": ((3,), torch.int64),  # position, tokens left, token of the prompt
                    "row": ((1,), torch.int64),
                    "token": ((most,), torch.int64),
                    "payload": ((most, 2), torch.float32),
                },
            )
            for _ in resources.slots
        ]

    def warm_up(self) -> None:
        for slot, staged in enumerate(self._staged):
            staged.host["row"][0] = self._resources.state.scratch_row
            staged.upload(self._resources.compute)
            for rank, length in product(self._ranks, self._lengths):
                self._resources.graphs.run(self._work, slot, rank, length)

    def run(self, slot: int, prompt: ScheduledPrompt, *, adapted: bool) -> None:
        """Enqueue it; its row is admitted."""
        staged, count = self._staged[slot], len(prompt.tokens)
        staged.host["cursor"][:] = prompt.start, count, 0
        staged.host["row"][0] = prompt.row
        stage_tokens(staged.host, 0, prompt.tokens)
        staged.upload(self._resources.compute)
        rank = self._ranks[-1] if adapted else 0
        for first in range(0, count, CHUNK):
            end = prompt.start + min(first + CHUNK, count)
            length = self._lengths[bisect.bisect_left(self._lengths, end)]
            self._resources.graphs.run(self._work, slot, rank, length)

    def _work(self, slot: int, rank: int, length: int) -> Work:
        """A pass over tokens whose sequence has up to `length` positions so far."""
        resources, buffers = self._resources, self._resources.slots[slot]
        model, kv, state = resources.model, resources.kv, resources.state
        staged = self._staged[slot].device
        cursor_3, row_1 = staged["cursor"], staged["row"]
        step_3 = torch.tensor([CHUNK, -CHUNK, CHUNK], device=cursor_3.device)
        num_pages = -(-length // kv.page_size)

        def work() -> None:
            real_T = self._offset_T < cursor_3[_LEFT]
            positions_T = (cursor_3[_START] + self._offset_T).masked_fill(~real_T, 0)
            at_T = (cursor_3[_FIRST] + self._offset_T).masked_fill(~real_T, 0)
            pages_M = state.page_table_RM[row_1][0, :num_pages]
            chunk = Chunk(
                cursor_3[: _LEFT + 1],
                positions_T,
                pages_M[positions_T // kv.page_size].masked_fill(~real_T, 0),
                pages_M,
                resources.adapters(state.adapter_slot_R[row_1], rank),
            )
            x_TD = model.embed(staged["token"][at_T], staged["payload"][at_T])
            hidden_TD = self._model.prefill_chunk(x_TD, chunk, kv)
            last_1 = (cursor_3[_LEFT : _LEFT + 1] - 1).clamp(0, CHUNK - 1)
            hidden_1D = hidden_TD.index_select(0, last_1)
            buffers.hidden_RD[:1].copy_(hidden_1D)
            buffers.logits_RV[:1].copy_(model.logits(hidden_1D))
            cursor_3.add_(step_3)

        return work
