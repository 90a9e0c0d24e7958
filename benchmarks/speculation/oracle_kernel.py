"""The oracle proposer as one CUDA launch."""

from __future__ import annotations

from pathlib import Path

import torch
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.proposer import RowHistory

SOURCE = "oracle.cu"
FOLDER = Path(__file__).parent
_THREADS = 1024


class OracleKernel:
    """An `OracleProposer` on the current GPU, reading that proposer's tables."""

    sequential = False

    def __init__(self, known_NC: torch.Tensor, drafts_NC: torch.Tensor) -> None:
        """Compile the oracle; the tables may change between launches."""
        assert known_NC.is_contiguous(), "a sequence of the table is a row"
        assert drafts_NC.is_contiguous(), "a sequence of the table is a row"
        self._tables = (known_NC, drafts_NC)
        self._oracle = Module(SOURCE, {}, folder=FOLDER).kernel("oracle")

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """See `Proposer`."""
        (rows, context), (known, length) = history.tokens_RC.shape, self._tables[0].shape
        self._oracle.launch(
            (rows, 1, 1),
            _THREADS,
            [
                *(history.tokens_RC, history.position_R, *self._tables, draft_RK),
                *(context, length, known, draft_RK.stride(0), draft_RK.shape[1]),
            ],
        )
