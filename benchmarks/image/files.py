"""The images of the benchmarks, charts or photographs, as JPEG files.

Charts are what published figures of other systems are of (ChartQA). Photographs are three times as
many bytes, and their details draw more power.
"""

from __future__ import annotations

import argparse
import io
import struct

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.image.charts import ChartMaker

# ---------------------------------------------------------------- photographs

# Images that decode and compress like photographs, reproducible by seed.
#
# Shape legend: S side of a canvas, H, W and C rows, columns and channels of an image.

Array = npt.NDArray[np.float32]

_LUMA_STD, _CHROMA_STD, _MEAN = 52.0, 14.0, 118.0
_LENS = 0.2  # cycles a pixel at which a lens passes 1/e of the contrast
_START, _COMMENT = b"\xff\xd8", b"\xff\xfe"
# Columns are R, G, B of the three components: brightness, blue against yellow, red against cyan.
_TO_RGB_CC = np.array([[1.0, 1.0, 1.0], [0.0, -0.34, 1.77], [1.4, -0.71, 0.0]], np.float32)


class Photographer:
    """Cuts windows from one canvas of 1/f noise, whose amplitudes fall as those of scenes do.

    `largest` is the longest side of any image to come.
    """

    def __init__(self, seed: int, largest: int) -> None:
        side = max(2048, 1 << largest.bit_length())
        self._seed = seed
        self._canvas_SS = _pink_noise(np.random.default_rng(seed), side)

    def pixels(self, index: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Return [H, W, C] of an image of `size` (width, height), unique to its index."""
        width, height = size
        rng = np.random.default_rng((self._seed, index))
        side = len(self._canvas_SS)
        components = []
        for std in (_LUMA_STD, _CHROMA_STD, _CHROMA_STD):
            top, left = rng.integers(0, side, 2)
            rows_H, columns_W = (top + np.arange(height)) % side, (left + np.arange(width)) % side
            components.append(std * self._canvas_SS[np.ix_(rows_H, columns_W)])
        mixed_HWC = np.stack(components, axis=-1) @ _TO_RGB_CC + _MEAN
        pixels_HWC: npt.NDArray[np.uint8] = np.clip(mixed_HWC, 0, 255).astype(np.uint8)
        return pixels_HWC

    def jpeg(self, index: int, size: tuple[int, int], quality: int = 85) -> bytes:
        """Return the same as a JPEG file."""
        data = io.BytesIO()
        Image.fromarray(self.pixels(index, size)).save(data, "JPEG", quality=quality)
        return data.getvalue()


def stamped(jpeg: bytes, serial: int) -> bytes:
    """Change the content hash by a comment of 8 bytes that holds `serial`.

    The receiver has to decode the image like any other, because only its bytes differ.
    """
    comment = struct.pack(">HQ", 2 + 8, serial)
    return b"".join((_START, _COMMENT, comment, jpeg[len(_START) :]))


def _pink_noise(rng: np.random.Generator, side: int) -> Array:
    """Return [S, S] of mean 0 and variance 1, periodic in both directions."""
    spectrum_SF = np.fft.rfft2(rng.standard_normal((side, side), dtype=np.float32))
    distance_SF = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    distance_SF[0, 0] = np.inf  # no brightness of its own
    lens_SF = np.exp(-((distance_SF / _LENS) ** 2))
    canvas_SS = np.fft.irfft2(spectrum_SF * lens_SF / distance_SF, s=(side, side))
    even_SS: Array = (canvas_SS / canvas_SS.std()).astype(np.float32)
    return even_SS


# ---------------------------------------------------------------- files

PHOTO, CHART = "photo", "chart"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--pictures`, which selects charts or photographs."""
    parser.add_argument("--pictures", choices=(PHOTO, CHART), default=CHART, help="what they show")


def jpegs(kind: str, count: int, size: tuple[int, int], seed: int = 0) -> list[bytes]:
    """Return different images of `size` (width, height), reproducible by seed."""
    maker = ChartMaker(seed) if kind == CHART else Photographer(seed, max(size))
    return [maker.jpeg(index, size) for index in range(count)]
