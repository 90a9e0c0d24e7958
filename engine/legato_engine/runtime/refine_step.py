"""Refinements on the device: their inputs staged in a slot, their results read from it."""

from __future__ import annotations

from typing import Any

import torch

from legato_engine.device.base import Device
from legato_engine.models.capabilities import MaskRefiner
from legato_engine.runtime.graph_runner import GraphRunner, Work


class RefineStep:
    """A refiner's launches. A launch owns its slot's pinned buffers until it is collected."""

    def __init__(
        self, refiner: MaskRefiner, device: Device, num_slots: int, graphs: GraphRunner
    ) -> None:
        self._refiner = refiner
        self._compute = device.compute
        self._graphs = graphs
        self._given = [
            [device.pinned(tuple(each.shape), each.dtype) for each in refiner.given]
            for _ in range(num_slots)
        ]
        answer = refiner.answer
        self._answers = [device.pinned(tuple(answer.shape), answer.dtype) for _ in range(num_slots)]

    def warm_up(self) -> None:
        """Capture the refinement, or run it once."""
        self._graphs.run(self._refine_work)

    def forward(self, slot: int, given: Any) -> None:
        """Stage the inputs, and enqueue their upload, the refinement and the copy back."""
        compute, hosts = self._compute, self._given[slot]
        for host, tensor in zip(hosts, self._refiner.tensors(given), strict=True):
            host.copy_(tensor)
        for device, host in zip(self._refiner.given, hosts, strict=True):
            compute.copy(device, host)
        self._graphs.run(self._refine_work)
        compute.copy(self._answers[slot], self._refiner.answer)

    def answer(self, slot: int) -> Any:
        """Copy the result of a finished launch into a numpy array."""
        return torch.clone(self._answers[slot]).numpy()

    def _refine_work(self) -> Work:
        return self._refiner.refine
