"""Drafts in a build of the resident kernel: constants, and where launches find a slot's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato_engine.kernels.cuda.drafting import RuleConstants
from legato_engine.speculative.block_policy import BlockPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.resident_launch import ResidentDrafts, ResidentRows

_ROW_FIELDS = ("scheduled_row", "room", "reach", "start", "fed")
_TOKEN_FIELDS = (
    *("row", "draft_index", "source", "token", "position", "fresh"),
    *("sample_row", "sample_position", "scheduled"),
)
_OUTPUTS = ("count", "proposed", "descriptor")


class BuildDrafts:
    """What a build has of drafts; nothing without a `policy`."""

    def __init__(self, policy: BlockPolicy | None, device: torch.device) -> None:
        self.defines: dict[str, int] = {"DRAFTS": int(policy is not None)}
        if policy is not None:
            self.defines |= RuleConstants.of(policy).defines
        self._device = device
        self._follows = torch.zeros(1, dtype=torch.int32, device=device)
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def table(self, rows: ResidentRows) -> torch.Tensor | None:
        """`Drafting` of drafts.cuh for these rows, whose tensors stay where they are."""
        drafts = rows.drafts
        if drafts is None:
            return None
        key = rows.row_B.data_ptr(), rows.ring_SB.data_ptr()
        if key not in self._tables:
            words = self._words(rows, drafts)
            self._tables[key] = torch.tensor(words, dtype=torch.int64, device=self._device)
        return self._tables[key]

    def _words(self, rows: ResidentRows, drafts: ResidentDrafts) -> list[int]:
        """The fields in their order, pointers and numbers alike."""
        state, staged = drafts.state, drafts.staged
        fields = (
            *(staged[name] for name in _ROW_FIELDS),
            rows.constraint_B,
            *(staged[name] for name in _TOKEN_FIELDS),
            *(state.tokens_RC, state.position_R, state.limit_R, state.draft_RK),
            *(rows.state.token_R, state.descriptor_R4, staged["control"]),
            *(drafts.rules, state.overall, drafts.seconds_P, state.block_S),
            *(drafts.outputs[name] for name in _OUTPUTS),
            *(drafts.ring[name] for name in _OUTPUTS),
        )
        context, tokens = state.tokens_RC.shape[1], len(staged["row"])
        numbers = (state.scratch_row, context, tokens, *drafts.lengths)
        return [*(each.data_ptr() for each in fields), *numbers, self._follows.data_ptr()]
