"""Benchmarks of images: charts and photographs."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random

import numpy as np
import pytest
from legato_engine.images.decoding import content_key, decode_encoded
from PIL import Image

from benchmarks.image import charts
from benchmarks.image.charts import KINDS, ChartMaker, Photographer, draw, invent, stamped, ticks

# ---------------------------------------------------------------- charts

SIZE = (850, 600)


def test_charts_are_reproducible_and_different() -> None:
    """Seed and index identify a chart; another of either is another one."""
    first = ChartMaker(3).jpeg(5, SIZE)
    assert ChartMaker(3).jpeg(5, SIZE) == first
    assert len({first, ChartMaker(3).jpeg(6, SIZE), ChartMaker(4).jpeg(5, SIZE)}) == 3


def test_charts_compress_as_real_ones_do() -> None:
    """A chart of any kind has tens of kilobytes at 850x600; photographs have over a hundred."""
    drawn = charts.jpegs(charts.CHART, 24, SIZE)
    photos = charts.jpegs(charts.PHOTO, 2, SIZE)
    assert all(20e3 < len(jpeg) < 80e3 for jpeg in drawn)
    assert all(len(jpeg) > 100e3 for jpeg in photos)
    assert len({*drawn, *photos}) == 26
    assert {invent(random.Random(f"0/{index}")).kind for index in range(64)} == KINDS.keys()


@pytest.mark.parametrize("size", [SIZE, (320, 240), (400, 800)])
def test_a_chart_has_the_size_asked_for(size: tuple[int, int]) -> None:
    """A chart has the requested size, in colour, and its pixels are those of its file."""
    image = Image.open(io.BytesIO(ChartMaker(0).jpeg(0, size)))
    assert (image.size, image.mode) == (size, "RGB")
    pixels_HWC = ChartMaker(0).pixels(0, size)
    assert pixels_HWC.shape == (size[1], size[0], 3)
    assert np.abs(np.asarray(image).astype(int) - pixels_HWC).mean() < 8


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_marks_follow_the_values(kind: str) -> None:
    """The image shows the figures: another value is another image, most of it flat areas."""
    chart = next(
        each
        for each in (invent(random.Random(seed)) for seed in itertools.count())
        if each.kind == kind
    )
    values_K = chart.values_SK[0]
    smaller = dataclasses.replace(
        chart, values_SK=((values_K[0] / 2, *values_K[1:]), *chart.values_SK[1:])
    )
    shown_HWC, other_HWC = (np.asarray(draw(each, SIZE)).astype(int) for each in (chart, smaller))
    assert (shown_HWC != other_HWC).any(axis=2).sum() > 100
    flat_HW = (shown_HWC[:, 1:] == shown_HWC[:, :-1]).all(axis=2)
    assert flat_HW.mean() > 0.85


@pytest.mark.parametrize("top", [0.3, 1.0, 9.99, 26.4, 100.0, 1101.0, 52_000.0])
def test_ticks_are_few_and_hold_the_highest_value(top: float) -> None:
    """Ticks begin at 0, end at or above the value, and are evenly spaced and few."""
    marks = ticks(top)
    assert 4 <= len(marks) <= 7
    assert marks[0] == 0
    assert marks[-2] < top <= marks[-1]
    assert np.diff(marks) == pytest.approx(marks[1])


# ---------------------------------------------------------------- photos

PHOTO_SIZE = (160, 120)


def test_images_are_reproducible_and_different() -> None:
    """Seed and index identify an image; another index is another one."""
    first, again = Photographer(3, 160), Photographer(3, 160)
    assert first.jpeg(5, PHOTO_SIZE) == again.jpeg(5, PHOTO_SIZE)
    assert first.jpeg(5, PHOTO_SIZE) != first.jpeg(6, PHOTO_SIZE)
    assert Photographer(4, 160).jpeg(5, PHOTO_SIZE) != first.jpeg(5, PHOTO_SIZE)


def test_images_have_the_size_asked_for() -> None:
    """An image has the requested size, in colour."""
    image = Image.open(io.BytesIO(Photographer(0, 160).jpeg(0, PHOTO_SIZE)))
    assert (image.size, image.mode) == (PHOTO_SIZE, "RGB")


def test_neighbouring_pixels_are_alike() -> None:
    """An image compresses like a photograph: its neighbours correlate, unlike noise."""
    grey_HW = Photographer(0, 160).pixels(0, PHOTO_SIZE).mean(axis=2)
    correlation = np.corrcoef(grey_HW[:, :-1].ravel(), grey_HW[:, 1:].ravel())[0, 1]
    assert correlation > 0.8
    assert grey_HW.std() > 10


def test_a_stamp_changes_the_key_and_no_pixel() -> None:
    """A stamped image is another one to a cache and has the same pixels."""
    jpeg = Photographer(0, 160).jpeg(0, PHOTO_SIZE)
    stamps = [stamped(jpeg, serial) for serial in (0, 1, 2**63)]
    assert len({content_key(data) for data in (jpeg, *stamps)}) == 4
    for data in stamps:
        shown_HWC = decode_encoded(data, max_pixels=10**6)
        assert np.array_equal(shown_HWC, decode_encoded(jpeg, max_pixels=10**6))
