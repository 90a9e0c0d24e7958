"""Tokens of a decode loop on their way to the host, one step at a time.

Shape legend: S steps, B tokens of a step.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.kernels.decode_loop import DONE, STOP


class TokenRing:
    """Page-locked memory that the device writes while the host reads it; one loop at a time."""

    def __init__(self, device: Device, *, max_steps: int, max_rows: int) -> None:
        self.ring_SB = device.pinned((max_steps, max_rows), torch.int64)
        self.words = device.pinned((2,), torch.int64)
        self._tokens_SB, self._words = self.ring_SB.numpy(), self.words.numpy()
        self._num_read = 0

    def reset(self) -> None:
        """No loop may be in flight."""
        self._words[:] = 0
        self._num_read = 0

    def stop(self) -> None:
        """The loop ends after the step that it is in."""
        self._words[STOP] = 1

    def read(self, num_rows: int) -> list[int] | None:
        """The tokens of the next step; None if it is not there yet."""
        if int(self._words[DONE]) == self._num_read:
            return None
        tokens: list[int] = self._tokens_SB[self._num_read, :num_rows].tolist()
        self._num_read += 1
        return tokens
