"""Prompts in captured passes of fixed shapes.

Shape legend: T tokens of a pass, M pages of a row, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from legato_engine.models.paged_attention import Chunk
from legato_engine.runtime.buffers import StagingBuffer
from legato_engine.runtime.decode_slot import Resources
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.kv_pool import doubling
from legato_engine.runtime.staging import ScheduledPrompt, bucket_for, stage_tokens

_START, _LEFT, _FIRST = 0, 1, 2

_LEAST_PASS = 32
"""Tokens of the smallest pass; fewer take as long."""
_MOST_POSITIONS = 2048
"""Of a captured pass. Its masked attention reads them all: 4,000 tokens take 57 ms, eagerly 37."""


class CapturedPrompts:
    """Runs prompts of a model with `prefill_chunk`, one after another.

    A pass reads its place from a cursor on the device and advances it, so a graph for each of
    `sizes` (tokens of a pass) and `lengths` (positions that it may attend to), both ascending,
    serves every prompt whose end it `takes`. A prompt is an upload and as many launches as it has
    passes, without allocations: passes have the largest size, and the last is padded to the
    smallest that holds it.
    """

    def __init__(self, resources: Resources, sizes: Sequence[int], lengths: Sequence[int]) -> None:
        device, most = resources.device, resources.model.max_context
        self._resources = resources
        self._sizes = sizes
        longest = min(most, _MOST_POSITIONS)
        self._lengths = [*(each for each in lengths if each < longest), longest]
        self._ranks = (0,) if resources.bank is None else (0, resources.bank.ranks[-1])
        self._num_prompts = resources.slots[0].max_prompts
        self._offset_T = torch.arange(sizes[-1], device=device.torch_device)
        self._staged = StagingBuffer(
            device,
            {
                "cursor": ((3,), torch.int64),  # position, tokens left, token of the prompt
                "row": ((1,), torch.int64),
                "token": ((most,), torch.int64),
                "payload": ((most, 2), torch.float32),
            },
            copies=len(resources.slots) * self._num_prompts,
        )
        like = resources.slots[0]
        self._hidden_1D = torch.zeros_like(like.hidden_RD[:1])
        self._logits_1V = torch.zeros_like(like.logits_RV[:1])

    @classmethod
    def of_any_length(cls, resources: Resources, max_size: int) -> CapturedPrompts:
        """Double sizes up to `max_size` and lengths up to the context, to capture few graphs."""
        most = resources.model.max_context
        sizes = doubling(_LEAST_PASS, min(max_size, most))
        return cls(resources, sizes, doubling(sizes[-1], most))

    def warm_up(self) -> None:
        self._staged.host["row"][0] = self._resources.state.scratch_row
        self._staged.upload(self._resources.compute)
        for rank, size, length in product(self._ranks, self._sizes, self._lengths):
            self._resources.graphs.run(self._pass_work, size, length, rank)
        self._resources.graphs.run(self._logits_work)

    def takes(self, end: int) -> bool:
        """Return whether the passes hold a prompt that ends before this position."""
        return end <= self._lengths[-1]

    def run(
        self, slot: int, index: int, prompt: ScheduledPrompt, output: int, *, adapted: bool
    ) -> None:
        """Enqueue prompt `index` of a launch, whose row is admitted.

        Row `output` of the slot gets the outputs of its last position.
        """
        compute, graphs = self._resources.compute, self._resources.graphs
        copy, count = slot * self._num_prompts + index, len(prompt.tokens)
        staged, buffers = self._staged.hosts[copy], self._resources.slots[slot]
        staged["cursor"][:] = prompt.start, count, 0
        staged["row"][0] = prompt.row
        stage_tokens(staged, 0, prompt.tokens)
        self._staged.upload(compute, copy)
        rank = self._ranks[-1] if adapted else 0
        for first in range(0, count, self._sizes[-1]):
            num_tokens = min(self._sizes[-1], count - first)
            size = bucket_for(self._sizes, num_tokens)
            length = bucket_for(self._lengths, prompt.start + first + num_tokens)
            graphs.run(self._pass_work, size, length, rank)
        graphs.run(self._logits_work)
        row = slice(output, output + 1)
        compute.copy(buffers.hidden_RD[row], self._hidden_1D)
        compute.copy(buffers.logits_RV[row], self._logits_1V)

    def _pass_work(self, size: int, length: int, rank: int) -> Work:
        resources, hidden_1D = self._resources, self._hidden_1D
        model, kv, state = resources.model, resources.kv, resources.state
        staged, offset_T = self._staged.device, self._offset_T[:size]
        cursor_3, row_1 = staged["cursor"], staged["row"]
        step_3 = torch.tensor([size, -size, size], device=cursor_3.device)
        num_pages = -(-length // kv.page_size)

        def work() -> None:
            real_T = offset_T < cursor_3[_LEFT]
            positions_T = (cursor_3[_START] + offset_T).masked_fill(~real_T, 0)
            at_T = (cursor_3[_FIRST] + offset_T).masked_fill(~real_T, 0)
            pages_M = state.page_table_RM[row_1][0, :num_pages]
            chunk = Chunk(
                cursor_3[: _LEFT + 1],
                positions_T,
                pages_M[positions_T // kv.page_size].masked_fill(~real_T, 0),
                pages_M,
                resources.adapters(state.adapter_slot_R[row_1], rank),
            )
            x_TD = model.embed(staged["token"][at_T], staged["payload"][at_T])
            hidden_TD = model.prefill_chunk(x_TD, chunk, kv)
            last_1 = (cursor_3[_LEFT : _LEFT + 1] - 1).clamp(0, size - 1)
            hidden_1D.copy_(hidden_TD.index_select(0, last_1))
            cursor_3.add_(step_3)

        return work

    def _logits_work(self) -> Work:
        model, hidden_1D, logits_1V = self._resources.model, self._hidden_1D, self._logits_1V

        def work() -> None:
            logits_1V.copy_(model.logits(hidden_1D))

        return work
