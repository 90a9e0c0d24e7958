"""Token choice and payload on the current GPU: one launch each, in place of the reference's ops.

Shape legend: B rows of a batch, R rows of the state, V vocabulary, C constraints, N coord bins,
S size bins (widths, then heights).
"""

from __future__ import annotations

from typing import Protocol

import torch

from legato_engine.errors import InternalError
from legato_engine.kernels.cuda.module import Module

MAX_VOCAB = 1 << 16  # the kernel keeps a token id in 16 bits

_THREADS = 1024
_VECTOR = 4  # values of one 16-byte load
_MAX_CLUSTER = 4  # 32 rows then fill the GPU once
_FIXED_SHARED = 34 * 1024  # what the kernel keeps beside the logits
_PAYLOAD_THREADS = 64


class RowTensors(Protocol):
    """What the device remembers of every row; the kernels write the first two."""

    token_R: torch.Tensor
    payload_R2: torch.Tensor
    temperature_R: torch.Tensor
    top_p_R: torch.Tensor
    top_k_R: torch.Tensor
    seed_R: torch.Tensor
    scratch_row: int


class Sampler:
    """Constraint, choice and finiteness of a batch. Can be captured; greedy rows cost little.

    Raises `InternalError` for a vocabulary that is no multiple of 4 or above `MAX_VOCAB`.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size % _VECTOR or not 0 < vocab_size <= MAX_VOCAB:
            raise InternalError(f"no sampling kernel for a vocabulary of {vocab_size}")
        defines = sampling_defines(vocab_size)
        self._cluster = defines["CLUSTER"]
        self._kernel = Module("sample.cu", defines).kernel("sample", shared=defines["SHARED"])

    def sample(
        self,
        state: RowTensors,
        logits_BV: torch.Tensor,
        constraints_CV: torch.Tensor,
        constraint_B: torch.Tensor,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        tokens_B: torch.Tensor,
        *,
        overlap: bool = True,
    ) -> None:
        """Write `tokens_B` and the rows' `token_R`: -1 and 0 where the logits are not finite.

        Logits and constraints are float32, the others int64; all are contiguous. Each row of the
        state says by itself whether it is greedy. Padding (`scratch_row`) gets token 0.
        """
        arguments = [logits_BV, constraints_CV, constraint_B, row_B, position_B]
        arguments += [state.temperature_R, state.top_p_R, state.top_k_R, state.seed_R]
        self._kernel.launch(
            (len(tokens_B) * self._cluster, 1, 1),
            _THREADS,
            [*arguments, state.token_R, tokens_B, state.scratch_row],
            cluster=self._cluster,
            overlap=overlap,
        )


class PayloadReader:
    """The values that coord and size tokens carry. Can be captured."""

    def __init__(
        self, *, coord_bins: int, coord_divisor: int, size_bins: int, coord: int, size: int
    ) -> None:
        """`size_bins` counts those of widths and of heights; `coord` and `size` are token ids."""
        defines = {"COORD_BINS": coord_bins, "SIZE_BINS": size_bins}
        defines |= {"COORD_DIVISOR": coord_divisor}
        defines |= {"COORD": coord, "SIZE": size}
        self._kernel = Module("payload.cu", defines).kernel("payload")

    def read(
        self,
        state: RowTensors,
        coord_BN: torch.Tensor,
        size_BS: torch.Tensor,
        row_B: torch.Tensor,
        payload_B2: torch.Tensor,
        *,
        overlap: bool = True,
    ) -> None:
        """Write `payload_B2` and the rows' `payload_R2` from float32 logits and their `token_R`.

        Rows of the logits may lie apart, by multiples of 4.
        """
        self._kernel.launch(
            (len(payload_B2), 1, 1),
            _PAYLOAD_THREADS,
            [
                *(coord_BN, size_BS, row_B, state.token_R, state.payload_R2, payload_B2),
                *(coord_BN.stride(0), size_BS.stride(0)),
            ],
            overlap=overlap,
        )


def sampling_defines(vocab_size: int) -> dict[str, int]:
    """Constants of `sample.cu`: as many thread blocks a row as have work, and their memory."""
    block = _THREADS * _VECTOR
    cluster = 1
    while cluster < _MAX_CLUSTER and cluster * block < vocab_size:
        cluster *= 2
    groups = -(-vocab_size // (cluster * block))
    shared = _FIXED_SHARED + groups * block * 4
    return {"VOCAB": vocab_size, "CLUSTER": cluster, "SHARED": shared}
