"""Speculation around a forward on the current GPU, one launch each.

Shape legend: R rows of the state, B tokens, K draft tokens, C positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from legato_engine.kernels.cuda.module import Module
from legato_engine.speculative.proposer import RowHistory

SOURCE = "draft_tokens.cu"
LOOKUP_SOURCE = "ngram_lookup.cu"
_THREADS = 128
_LOOKUP_THREADS = 256
_VECTOR_BYTES = 16


class DraftTensors(Protocol):
    """Per-row draft state on the device; all int64 but the residual streams."""

    tokens_RC: torch.Tensor
    position_R: torch.Tensor
    limit_R: torch.Tensor
    draft_RK: torch.Tensor
    hidden_RD: torch.Tensor
    scratch_row: int


class DraftKernels:
    """The operations of `runtime.draft_state.DraftState`. Can be captured."""

    def __init__(self, max_block: int, vocab_size: int) -> None:
        module = Module(SOURCE, {"BLOCK": max_block, "VOCAB": vocab_size})
        self._place = module.kernel("place")
        self._settle = module.kernel("settle")

    def place(self, state: DraftTensors, staged: Mapping[str, torch.Tensor], batch: int) -> None:
        """Give each staged lane its token and position; `staged` is int64."""
        fed = ("row", "draft_index", "source", "token", "position", "fresh")
        names = (*fed, "sample_row", "sample_position")
        self._place.launch(
            (-(-batch // _THREADS), 1, 1),
            _THREADS,
            [
                *(state.draft_RK, state.position_R, state.limit_R),
                *(staged[name] for name in names),
                *(batch, state.scratch_row),
            ],
        )

    def settle(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        sampled_B: torch.Tensor,
        hidden_BD: torch.Tensor,
        token_R: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        batch: int,
    ) -> None:
        """Accept draft tokens that were sampled too; rows of D have a multiple of 16 bytes."""
        width = hidden_BD.shape[1] * hidden_BD.element_size()
        assert width % _VECTOR_BYTES == 0, f"rows of {width} bytes"
        self._settle.launch(
            (batch, 1, 1),
            _THREADS,
            [
                *(
                    state.draft_RK,
                    staged["sample_row"],
                    staged["draft_index"],
                    staged["sample_position"],
                ),
                *(sampled_B, hidden_BD, state.tokens_RC, state.position_R, token_R),
                *(state.hidden_RD, outputs["count"], outputs["proposed"]),
                *(batch, state.tokens_RC.shape[1], width // _VECTOR_BYTES, state.scratch_row),
            ],
        )


class LookupKernel:
    """A `LookupProposer` in one launch."""

    def __init__(self, *, shortest: int = 1, longest: int = 4) -> None:
        self._lengths = (shortest, longest)
        self._lookup = Module(LOOKUP_SOURCE, {}).kernel("lookup")

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        rows, context = history.tokens_RC.shape
        self._lookup.launch(
            (rows, 1, 1),
            _LOOKUP_THREADS,
            [
                *(history.tokens_RC, history.position_R, draft_RK),
                *(context, draft_RK.stride(0), draft_RK.shape[1], *self._lengths),
            ],
        )
