"""Refinements on a device: what is given staged in a slot, and what is answered read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from legato_engine.device.base import Device
from legato_engine.models.model import MaskRefiner

Work = Callable[[], None]


class RefineStep:
    """A refiner's launches; like any other, one of them owns its slot's buffers until collected."""

    def __init__(
        self,
        refiner: MaskRefiner,
        device: Device,
        num_slots: int,
        capture: Callable[[Work], Work],
    ) -> None:
        self._refiner = refiner
        self._device = device
        self._capture = capture
        self._given = [
            [device.pinned(tuple(each.shape), each.dtype) for each in refiner.given]
            for _ in range(num_slots)
        ]
        answer = refiner.answer
        self._answers = [device.pinned(tuple(answer.shape), answer.dtype) for _ in range(num_slots)]
        self._work: Work | None = None

    def warm_up(self) -> None:
        """Capture the work, or run it once."""
        self._work = self._capture(self._refiner.refine)
        self._device.compute.submit(self._work)

    def forward(self, slot: int, given: Any) -> None:
        """Stage what is given, and enqueue all of the work."""
        assert self._work is not None, "refined before it was warm"
        compute, hosts = self._device.compute, self._given[slot]
        for host, tensor in zip(hosts, self._refiner.tensors(given), strict=True):
            host.copy_(tensor)
        for device, host in zip(self._refiner.given, hosts, strict=True):
            compute.copy(device, host)
        compute.submit(self._work)
        compute.copy(self._answers[slot], self._refiner.answer)

    def answer(self, slot: int) -> Any:
        """A numpy copy of what a finished launch answered."""
        return torch.clone(self._answers[slot]).numpy()
