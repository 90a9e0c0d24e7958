"""Token sampling in one launch.

Shape legend: B rows of a batch, R rows of the state, V vocabulary, C constraints, S rows with one,
D width.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from legato_engine.errors import InternalError
from legato_engine.kernels.cuda import capability
from legato_engine.kernels.cuda.capability import Feature, Gpu
from legato_engine.kernels.cuda.module import Argument, Module

MAX_VOCAB = 1 << 16  # the kernel keeps a token id in 16 bits

_THREADS = 1024
_VECTOR = 4  # values of one 16-byte load
_BLOCK = _THREADS * _VECTOR
_MAX_CLUSTER = 4  # 32 rows then fill the GPU once
_FIXED_SHARED = 34 * 1024  # what the kernel keeps beside the logits


class RowTensors(Protocol):
    """Per-row sampling state on the device; kernels write the first two."""

    token_R: torch.Tensor
    payload_R2: torch.Tensor
    temperature_R: torch.Tensor
    top_p_R: torch.Tensor
    top_k_R: torch.Tensor
    seed_R: torch.Tensor
    scratch_row: int


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """B sampled tokens: where they came from, and what is read of those with values.

    Token b has the constraint at `entry_B[b]`, or at b without it. Logits, constraints, payloads
    and certainties are float32, the others but `hidden_BD` int64.
    """

    row_B: torch.Tensor
    token_B: torch.Tensor
    hidden_BD: torch.Tensor
    logits_BV: torch.Tensor
    constraints_CV: torch.Tensor
    constraint_S: torch.Tensor
    entry_B: torch.Tensor | None
    payload_B2: torch.Tensor
    certainty_B2: torch.Tensor

    def part(self, of: slice) -> SampledTokens:
        cut = ["row_B", "token_B", "hidden_BD", "logits_BV", "payload_B2", "certainty_B2"]
        cut.append("constraint_S" if self.entry_B is None else "entry_B")
        return dataclasses.replace(self, **{name: getattr(self, name)[of] for name in cut})


class Sampler:
    """Constrained sampling of a batch, with a check for finite logits. Can be captured."""

    def __init__(self, vocab_size: int) -> None:
        """Compile for one vocabulary.

        Raises:
            InternalError: its size is no multiple of 4, or above `MAX_VOCAB`.
        """
        if vocab_size % _VECTOR or not 0 < vocab_size <= MAX_VOCAB:
            raise InternalError(f"no sampling kernel for a vocabulary of {vocab_size}")
        defines = sampling_defines(vocab_size, capability.current_gpu())
        self._cluster = defines["CLUSTER"]
        self._spilled = 0 if defines["HELD"] else _groups(vocab_size, 1) * _BLOCK
        self._kernel = Module("sample.cu", defines).kernel("sample", shared=defines["SHARED"])

    def sample(
        self,
        state: RowTensors,
        logits_BV: torch.Tensor,
        constraints_CV: torch.Tensor,
        constraint_S: torch.Tensor,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        tokens_B: torch.Tensor,
        *,
        entry_B: torch.Tensor | None = None,
    ) -> None:
        """Write `tokens_B` and the rows' `token_R`: -1 and 0 where the logits are not finite.

        A token's constraint is at its index, or at `entry_B` of it. Logits and constraints are
        float32, the others int64; all are contiguous. Padding (`scratch_row`) gets token 0.
        """
        count = len(tokens_B)
        spilled = logits_BV.new_empty(count, self._spilled) if self._spilled else None
        arguments: list[Argument] = [logits_BV, constraints_CV, constraint_S, entry_B]
        arguments += [row_B, position_B]
        arguments += [state.temperature_R, state.top_p_R, state.top_k_R, state.seed_R]
        self._kernel.launch(
            (count * self._cluster, 1, 1),
            _THREADS,
            [*arguments, state.token_R, tokens_B, spilled, state.scratch_row],
            cluster=self._cluster,
        )


def sampling_defines(vocab_size: int, gpu: Gpu) -> dict[str, int]:
    """Return the macros of the sampling kernel for this vocabulary and GPU.

    Without clusters a row has one thread block. What its shared memory cannot hold (unless `HELD`)
    is in global memory.
    """
    cluster = 1
    while gpu.has(Feature.CLUSTERS) and cluster < _MAX_CLUSTER and cluster * _BLOCK < vocab_size:
        cluster *= 2
    shared = _FIXED_SHARED + _groups(vocab_size, cluster) * _BLOCK * 4
    held = shared <= gpu.shared
    return {
        "VOCAB": vocab_size,
        "CLUSTER": cluster,
        "SHARED": shared if held else _FIXED_SHARED,
        "HELD": int(held),
    }


def _groups(vocab_size: int, cluster: int) -> int:
    return -(-vocab_size // (cluster * _BLOCK))
