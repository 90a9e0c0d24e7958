"""Code that every peer's process shares: options, the decoder's shape, timing, output."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import shared_options


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with parallel blocks of attention and MLP, as in Phi and Moondream 2."""

    dim: int = 2048
    layers: int = 24
    heads: int = 32
    ff_dim: int = 8192
    vocab: int = 51200
    max_context: int = 2048
    rotary_dim: int = 32

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


MOONDREAM2 = Shape()
DRY = Shape(dim=128, layers=2, heads=2, ff_dim=256, vocab=512)  # the same head, so the same RoPE


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to measure: `steps` timed ones per number of streams, the first at `context`."""

    streams: tuple[int, ...]
    context: int
    steps: int
    warm_up: int
    device: str
    dry: bool
    path: str
    compiled: bool

    @property
    def shape(self) -> Shape:
        """The decoder to build."""
        return DRY if self.dry else MOONDREAM2

    @property
    def capacity(self) -> int:
        """Positions that a cache needs, rounded up to 64."""
        return -(-(self.context + self.warm_up + self.steps + 1) // 64) * 64


class StepTimer:
    """Times between marks: by events of the current stream on a GPU, by the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of one step and the beginning of the next."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps(self) -> list[float]:
        """Return milliseconds between consecutive marks, once all have passed."""
        pairs = itertools.pairwise(self._marks)
        if self._device.type == "cpu":
            return [(end - start) * 1e3 for start, end in pairs]
        torch.accelerator.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def step_times(step: Callable[[], object], options: Options) -> list[float]:
    """Return milliseconds of `options.steps` consecutive steps, after the warm-up."""
    for _ in range(options.warm_up):
        step()
    synchronize(options.device)
    timer = StepTimer(options.device)
    timer.mark()
    for _ in range(options.steps):
        step()
        timer.mark()
    return timer.laps()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def emit(row: Mapping[str, Any]) -> None:
    """Print one line of JSON for the parent; it survives a later failure."""
    print(json.dumps(row), flush=True)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse the options of a peer's process."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--path", default="", help="of the peer's code, where it has no package")
    arguments = parser.parse_args(argv)
    return Options(
        streams=tuple(arguments.streams),
        context=min(arguments.context, 64) if arguments.dry else arguments.context,
        steps=min(arguments.steps, 4) if arguments.dry else arguments.steps,
        warm_up=2 if arguments.dry else 8,
        device=arguments.device,
        dry=arguments.dry,
        path=arguments.path,
        compiled=not arguments.eager,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the parent passes on."""
    parser.add_argument(
        "--streams", type=shared_options.numbers, default=[1, 8, 32], help="e.g. 1,8,32"
    )
    parser.add_argument("--context", type=int, default=850, help="positions before the first step")
    parser.add_argument("--steps", type=int, default=60, help="timed steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="tiny sizes: does the code run?")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")


def versions(*modules: str) -> dict[str, str]:
    """Return the versions of imported modules."""
    names = ("torch", *modules)
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in names}
