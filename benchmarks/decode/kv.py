"""Savings of cached prefixes, and the cost of pages swapped to the host.

First tokens of requests whose prompt begins like an earlier one (words, or an image), beside those
of requests that share nothing. For a preempted sequence: the time to bring its pages back from
pinned host memory, beside recomputing them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.device.base import Device
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    CachedImageRef,
    ImageProperties,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)

from benchmarks import record

_MS = 1e3
_PICTURE = (600, 850, 3)


class Asker(SilentSink):
    """Requests for one token, one after the other, over one scheduler and its cache."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._scheduler = assembly.scheduler(self, pipeline_depth=2)
        self._ids = itertools.count()

    def first_token_ms(
        self, start: Sequence[int], image: PreparedImage | None = None
    ) -> tuple[float, int]:
        """Return the time from submission to the first token, and the cached positions.

        The prompt is `start` and a new question after it.
        """
        sequence = self._sequence(start, image)
        begin = time.perf_counter()
        self._scheduler.submit(sequence)
        self._scheduler.drain()
        return (time.perf_counter() - begin) * _MS, sequence.pages.cached_tokens

    def _sequence(self, start: Sequence[int], image: PreparedImage | None) -> EngineSequence:
        index = next(self._ids)
        request = Request(
            request_id=RequestKey(str(index)),
            task=QuerySpec(question=f"{index}: what is there?"),
            image=None if image is None else CachedImageRef(image_id=image.key),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0),
        )
        sequence = make_sequence(self._assembly.frontend, request, image)
        sequence.prompt = (*map(PromptToken, start), *sequence.prompt)
        return dataclasses.replace(sequence)  # its tokens are those of the longer prompt


def sharing(assembly: Assembly, shared: int, repeats: int) -> list[dict[str, float | str]]:
    """Return median first-token times of leaders, with new prompts, and of their followers."""
    asker, rows = Asker(assembly), []
    draw = np.random.default_rng(0)
    for what in ("words", "picture"):
        if what == "picture" and not assembly.frontend.max_images:
            continue
        asker.first_token_ms(*_start(assembly, what, shared, draw))  # warm-up
        asker.first_token_ms(())
        leaders, followers, found = [], [], 0
        for _ in range(repeats):
            start = _start(assembly, what, shared, draw)
            leaders.append(asker.first_token_ms(*start)[0])
            for _ in range(2):
                follower_ms, found = asker.first_token_ms(*start)
                followers.append(follower_ms)
        leader, follower = statistics.median(leaders), statistics.median(followers)
        rows.append(
            {
                "shared": what,
                "positions": found,
                "leader_ms": leader,
                "follower_ms": follower,
                "ratio": leader / follower,
            }
        )
    return rows


def _start(
    assembly: Assembly, what: str, shared: int, draw: np.random.Generator
) -> tuple[Sequence[int], PreparedImage | None]:
    """Return a new beginning of a prompt: so many tokens, or an image."""
    if what == "words":
        return draw.integers(100, assembly.model.vocab_size, shared).tolist(), None
    pixels = draw.integers(0, 256, _PICTURE, dtype=np.uint8)
    key = str(draw.integers(1 << 62))
    info = ImageProperties(image_id=key, width=_PICTURE[1], height=_PICTURE[0], cache_hit=False)
    return (), assembly.frontend.prepare_image(pixels, key, info)


def swapping(assembly: Assembly, positions: int, repeats: int) -> dict[str, float]:
    """Return milliseconds to copy the KV of positions to pinned memory and back, and to recompute.

    Recomputed: all of it, and all but 120 positions that are still cached.
    """
    kv, device = assembly.kv, assembly.device
    count = -(-positions // kv.page_size)
    pages = torch.randperm(assembly.num_pages - 1)[:count].to(device.torch_device) + 1
    tensors = (kv.k_LNHSE, kv.v_LNHSE)
    staged = [tensor[:, pages].contiguous() for tensor in tensors]
    pinned = [device.pinned(tuple(each.shape), each.dtype) for each in staged]

    def out() -> None:
        for tensor, stage in zip(tensors, staged, strict=True):
            torch.index_select(tensor, 1, pages, out=stage)

    def back() -> None:
        for tensor, stage in zip(tensors, staged, strict=True):
            tensor.index_copy_(1, pages, stage)

    def swap_out() -> None:
        device.compute.submit(out)
        for stage, host in zip(staged, pinned, strict=True):
            device.compute.copy(host, stage)

    def swap_in() -> None:
        for stage, host in zip(staged, pinned, strict=True):
            device.compute.copy(stage, host)
        device.compute.submit(back)

    asker, draw = Asker(assembly), np.random.default_rng(1)
    whole, tail = [], []
    for _ in range(repeats + 1):
        start, _ = _start(assembly, "words", positions, draw)
        whole.append(asker.first_token_ms(start)[0])
        start = [*start[:-120], *draw.integers(100, assembly.model.vocab_size, 120).tolist()]
        tail.append(asker.first_token_ms(start)[0])
    return {
        "positions": positions,
        "megabytes": sum(each.nbytes for each in staged) / 1e6,
        "swap_out_ms": _device_ms(device, swap_out, repeats),
        "swap_in_ms": _device_ms(device, swap_in, repeats),
        "recompute_all_ms": statistics.median(whole[1:]),
        "recompute_120_ms": statistics.median(tail[1:]),
    }


def _device_ms(device: Device, enqueue: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = device.compute.record()
        enqueue()
        stop = device.compute.record()
        stop.wait()
        times.append((stop.time_ns() - start.time_ns()) / 1e6)
    return statistics.median(times[1:])


def main(argv: Sequence[str]) -> int:
    """Measure both and record them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="kv", help="of the record")
    parser.add_argument("--shared", type=int, default=700, help="words that prompts begin with")
    parser.add_argument("--positions", type=int, default=850, help="of the sequence that gave way")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    config = msgspec.structs.replace(model_config(arguments), max_running=4)
    assembly = assemble(config)
    shared = sharing(assembly, arguments.shared, arguments.repeats)
    swapped = swapping(assembly, arguments.positions, arguments.repeats)
    info = assembly.info
    assembly.device.close()
    figures = {"sharing": shared, "swapping": swapped}
    title = f"KV cache: {info.name} ({info.dtype}) on {info.device}"
    record.write(arguments.name, title, figures, _tables(shared, swapped))
    return 0


def _tables(shared: Sequence[dict[str, float | str]], swapped: dict[str, float]) -> list[str]:
    keys = ("leader_ms", "follower_ms", "ratio")
    return [
        record.table(
            ("shared", "positions found", "leader ms", "follower ms", "times faster"),
            [
                [row["shared"], row["positions"], *(f"{row[key]:.2f}" for key in keys)]
                for row in shared
            ],
        ),
        "",
        record.table(list(swapped), [[f"{value:.2f}" for value in swapped.values()]]),
    ]
