"""A one-layer draft as five kernels a token.

Shape legend as in `decoder`, but R rows of the state, K draft tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.proposer import RowHistory

SOURCE = "draft_layer.cu"
_ROWS, _WARPS, _READERS = 4, 8, 32
_HEAD_DIM = 64

WIDEST = 3072
"""Maximum inputs of the next stream, D + F: four rows of them fit shared memory as float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftWeights:
    """The layer's weights, and the model's embeddings, last norm and head."""

    ln_state: Affine
    ln_token: Affine
    join: Affine
    ln: Affine
    query: Affine
    proj: Affine
    fc1: Affine
    fc2: Affine
    words_VD: torch.Tensor
    post_ln: Affine
    head: Affine


@dataclasses.dataclass(frozen=True, slots=True)
class DraftSizes:
    """Constants of the kernels; `max_pages` of a page table's row."""

    dim: int
    inner: int
    num_heads: int
    vocab_size: int
    page_size: int
    max_pages: int
    num_angles: int

    @property
    def defines(self) -> dict[str, int]:
        return {
            "DIM": self.dim,
            "INNER": self.inner,
            "HEADS": self.num_heads,
            "VOCAB": self.vocab_size,
            "PAGE": self.page_size,
            "PAGES": self.max_pages,
            "ANGLES": self.num_angles,
        }


def supported(
    sizes: DraftSizes, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    if {dtype, kv_dtype} != {torch.bfloat16}:
        return False
    fits = sizes.dim == sizes.num_heads * _HEAD_DIM and sizes.dim + sizes.inner <= WIDEST
    whole = not (sizes.inner % _WARPS or sizes.vocab_size % _WARPS)
    return fits and whole and runs(Kernels.STEPS, device)


class DraftLayerKernels:
    """A `Proposer` of the likeliest tokens; one call at a time, because calls share buffers."""

    sequential = True

    def __init__(
        self,
        sizes: DraftSizes,
        weights: DraftWeights,
        kv: tuple[torch.Tensor, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """`kv`: bf16 keys and values [N, H, S, E]; `angles`: cosines and sines."""
        maps = (getattr(weights, field.name) for field in dataclasses.fields(weights))
        values = [
            tensor for each in maps for tensor in (each if isinstance(each, Affine) else [each])
        ]
        assert {each.dtype for each in (*values, *kv)} == {torch.bfloat16}, "bf16 is read"
        assert all(each.is_contiguous() for each in (*values, *kv, *angles)), "rows are read whole"
        module = Module(SOURCE, sizes.defines)
        self._join, self._in, self._attend, self._out, self._head = (
            module.kernel(f"draft_{name}") for name in ("join", "in", "attend", "out", "head")
        )
        self._sizes = sizes
        self._weights = weights
        self._kv = kv
        self._angles = angles
        self._buffers: _Buffers | None = None

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        rows = history.tokens_RC.shape[0]
        if self._buffers is None or len(self._buffers.token_R) != rows:
            self._buffers = _Buffers(self._sizes, rows, draft_RK.device)
        for step in range(draft_RK.shape[1]):
            self._token(self._buffers, history, draft_RK, step)

    def _token(
        self, buffers: _Buffers, history: RowHistory, draft_RK: torch.Tensor, step: int
    ) -> None:
        sizes, weights = self._sizes, self._weights
        rows, context = history.tokens_RC.shape
        newest_R, pages_RM = history.position_R, history.page_table_RM
        by_rows, threads = -(-rows // _ROWS), 32 * _WARPS
        stream, pre, queries = buffers.stream_RD, buffers.pre_RD, buffers.query_RD
        inner, seen, token = buffers.inner_RF, buffers.seen_RD, buffers.token_R
        assert pages_RM.shape[1] == sizes.max_pages, f"a table of {pages_RM.shape[1]} pages"
        self._join.launch(
            (sizes.dim // _WARPS, by_rows, 1),
            threads,
            [
                *(history.hidden_RD, history.tokens_RC, newest_R, token, weights.words_VD),
                *(*weights.ln_state, *weights.ln_token, *weights.join),
                *(stream, pre, rows, context, int(step == 0)),
            ],
            overlap=step > 0,
        )
        self._in.launch(
            ((sizes.dim + sizes.inner) // _WARPS, by_rows, 1),
            threads,
            [pre, *weights.ln, *weights.query, *weights.fc1, queries, inner, rows],
            overlap=True,
        )
        last = self._angles[0].shape[0] - 1
        self._attend.launch(
            (sizes.num_heads, rows, 1),
            32 * _READERS,
            [queries, newest_R, pages_RM, *self._kv, *self._angles, seen, step, last],
            overlap=True,
        )
        self._out.launch(
            (sizes.dim // _WARPS, by_rows, 1),
            threads,
            [seen, inner, *weights.proj, *weights.fc2, stream, rows],
            overlap=True,
        )
        self._head.launch(
            (sizes.vocab_size // _WARPS, by_rows, 1),
            threads,
            [
                *(stream, *weights.post_ln, *weights.head),
                *(buffers.best_R, buffers.done_G, token, draft_RK),
                *(rows, draft_RK.stride(0), step),
            ],
            overlap=True,
        )


class _Buffers:
    """Results between kernels; float32 but for `token_R` (int64) and the counts."""

    def __init__(self, sizes: DraftSizes, rows: int, device: torch.device) -> None:
        def values(width: int) -> torch.Tensor:
            return torch.zeros(rows, width, device=device)

        self.stream_RD, self.pre_RD = values(sizes.dim), values(sizes.dim)
        self.query_RD, self.seen_RD = values(sizes.dim), values(sizes.dim)
        self.inner_RF = values(sizes.inner)
        self.token_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.best_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done_G = torch.zeros(-(-rows // _ROWS), dtype=torch.int32, device=device)
