"""A captured CUDA graph."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """Work that replays a graph, which is kept so that others may include a copy of it."""

    graph: torch.cuda.CUDAGraph  # noqa: TID251 - a part of the CUDA device that needs no bindings

    def __call__(self) -> None:
        self.graph.replay()
