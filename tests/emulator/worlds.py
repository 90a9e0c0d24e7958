"""A small model for the resident kernel on the emulated machine."""

from __future__ import annotations

import functools

import torch
from legato_engine.kernels.cuda.resident import RING_STAGES, ResidentWeights
from legato_engine.resident.sizes import ModelSizes

from benchmarks.resident_kernel import ResidentKernel
from benchmarks.resident_model import Cache, Model
from tests.emulator.module import EmulatedModule, Patch, Schedule

CPU = torch.device("cpu")
SMALL = ModelSizes(dim=128, ff_ratio=2, num_layers=2, vocab_size=256)
"""8 workers, of two heads."""
PAGES = 12
"""Of a row."""
PLACES = (160, 17, 1, 0, 100, 15, 63, 64)
"""Positions of rows: within pages, and at both sides of their ends."""


class World:
    """A model with random weights and its builds, which share the packed weights."""

    def __init__(self, sizes: ModelSizes = SMALL, *, patches: tuple[Patch, ...] = ()) -> None:
        torch.manual_seed(0)
        self.sizes, self.device, self.schedule = sizes, CPU, Schedule()
        self.model = Model.random(sizes, PAGES * 16, CPU)
        self.compile = functools.partial(EmulatedModule, schedule=self.schedule, patches=patches)
        self._kernels: dict[int, ResidentKernel] = {}
        self._weights: ResidentWeights | None = None

    def kernel(self, num_rows: int) -> ResidentKernel:
        tiles = next(tiles for tiles in RING_STAGES if num_rows <= 8 * tiles)
        if tiles not in self._kernels:
            made = ResidentKernel(
                self.model, tiles, weights=self._weights, compile_source=self.compile
            )
            self._kernels[tiles], self._weights = made, made.weights
        return self._kernels[tiles]


class Rows:
    """Rows of a launch with a cache of their own."""

    def __init__(self, world: World, count: int) -> None:
        torch.manual_seed(count)
        self.count, self.sizes = count, world.sizes
        self.tokens = torch.randint(world.sizes.vocab_size, (count,))
        self.positions = torch.tensor([PLACES[row % len(PLACES)] for row in range(count)])
        self.cache = Cache.random(world.sizes, count, PAGES, CPU)

    def run(self, kernel: ResidentKernel, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [S, B] and logits [S, B, V]."""
        logits = torch.full((steps, 8 * kernel.tiles, self.sizes.vocab_size), torch.nan)
        kernel.run(self.cache, self.tokens, self.positions, steps, logits=logits)
        assert kernel.ended("test")
        return kernel.tokens(steps, self.count), logits[:, : self.count]
