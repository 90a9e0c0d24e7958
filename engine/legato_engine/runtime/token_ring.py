"""Outputs of a decode loop's steps on their way to the host.

Shape legend: S steps, N bytes of a step's outputs, B tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from legato_engine.device.base import Device
from legato_engine.kernels.decode_loop import DONE, STOP
from legato_engine.runtime.staging import StagingBuffer


class TokenRing:
    """Page-locked memory that the device writes while the host reads it; one loop at a time."""

    def __init__(self, device: Device, outputs: StagingBuffer, *, max_steps: int) -> None:
        """Each step has copies of all fields of `outputs`."""
        self.ring_SN = device.pinned((max_steps, len(outputs.device_bytes)), torch.uint8)
        self.words = device.pinned((2,), torch.int64)
        self.fields = {name: self._field(outputs, name) for name in outputs.device}
        """Of all steps, by name; a step's are one after the other."""
        self._steps = [outputs.views(step_N) for step_N in self.ring_SN]
        self._words = self.words.numpy()
        self._num_read = 0

    def _field(self, outputs: StagingBuffer, name: str) -> torch.Tensor:
        field = outputs.device[name]
        first = field.data_ptr() - outputs.device_bytes.data_ptr()
        whole = self.ring_SN[:, first : first + field.nbytes].view(field.dtype)
        return whole.view(len(whole), *field.shape)

    def reset(self) -> None:
        """No loop may be in flight."""
        self._words[:] = 0
        self._num_read = 0

    def stop(self) -> None:
        """The loop ends after the step that it is in."""
        self._words[STOP] = 1

    def read(self) -> Mapping[str, np.ndarray] | None:
        """The next step's outputs, valid until the next loop; None if they are not there yet."""
        if int(self._words[DONE]) == self._num_read:
            return None
        self._num_read += 1
        return self._steps[self._num_read - 1]
