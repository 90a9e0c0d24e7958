"""The images of the benchmarks, charts or photographs, as JPEG files.

Charts are what published figures of other systems are of (ChartQA). Photographs are three times as
many bytes, and their details draw more power.
"""

from __future__ import annotations

import argparse

from benchmarks.image.charts import ChartMaker
from benchmarks.image.photos import Photographer

PHOTO, CHART = "photo", "chart"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--pictures`, which selects charts or photographs."""
    parser.add_argument("--pictures", choices=(PHOTO, CHART), default=CHART, help="what they show")


def jpegs(kind: str, count: int, size: tuple[int, int], seed: int = 0) -> list[bytes]:
    """Return different images of `size` (width, height), reproducible by seed."""
    maker = ChartMaker(seed) if kind == CHART else Photographer(seed, max(size))
    return [maker.jpeg(index, size) for index in range(count)]
