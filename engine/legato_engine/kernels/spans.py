"""Where tokens of a pass are: their rotations, pages and slots.

Shape legend: T tokens, C sequences, M pages of a sequence, P positions, R rotated dims of a head.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """T tokens' cosines and sines, and int64 pages and slots."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    page_T: torch.Tensor
    slot_T: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlacedSpan:
    """Consecutive positions of one sequence that only the device knows.

    `start` (int64 [2]): the first of them and the number of tokens before the padding, which
    `positions_T` has at 0, and `page_T` on the scratch page. C is 1.
    """

    start: torch.Tensor
    pages_CM: torch.Tensor
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor
    positions_T: torch.Tensor
    page_T: torch.Tensor

    def metadata(self, count: int, page_size: int) -> AttentionMetadata:
        """Of all tokens."""
        del count
        return AttentionMetadata(
            self.cos_PR[self.positions_T][:, None],
            self.sin_PR[self.positions_T][:, None],
            self.page_T,
            self.positions_T % page_size,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive positions, from `start` on, of C sequences with equally many tokens.

    Sequences follow each other. `pages_CM` (int64, contiguous rows) covers earlier positions too;
    the tables are float32 [P, R/2].
    """

    start: int
    pages_CM: torch.Tensor
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def metadata(self, count: int, page_size: int) -> AttentionMetadata:
        """Of the first `count` tokens of all sequences together."""
        num_sequences = len(self.pages_CM)
        stop = self.start + count // num_sequences
        positions_P = torch.arange(self.start, stop, device=self.pages_CM.device)
        positions_T = positions_P.repeat(num_sequences)
        return AttentionMetadata(
            self.cos_PR[positions_T][:, None],
            self.sin_PR[positions_T][:, None],
            self.pages_CM[:, positions_P // page_size].flatten(),
            positions_T % page_size,
        )
