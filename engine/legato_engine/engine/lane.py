"""Lanes of image preparation."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import ParamSpec

from legato_engine.images.decoding_workers import DecodingWorkers

P = ParamSpec("P")


class Lane:
    """Threads that prepare images, and processes that decode for them.

    A lane keeps its images in order. Those of one lane do not wait for those of another.
    """

    def __init__(self, name: str, threads: int, *, max_pixels: int, nice: int = 0) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, f"legato-{name}")
        self.workers = DecodingWorkers(max_pixels=max_pixels, nice=nice)

    def submit(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `work`, which must not raise, on a thread."""
        self._pool.submit(work, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.workers.close()
        self._pool.shutdown(wait=True)
