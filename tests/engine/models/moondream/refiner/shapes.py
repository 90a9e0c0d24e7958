"""Masks of known shapes, and the overlap of masks."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw

SIDE = 300


def _middles() -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    return x, y


def disc(x: float = 150, y: float = 150, radius: float = 100) -> np.ndarray:
    """A disc in `SIDE` by `SIDE` pixels, like the shapes below."""
    xs, ys = _middles()
    return (xs - x) ** 2 + (ys - y) ** 2 < radius**2


def star() -> np.ndarray:
    """Five points, ten corners."""
    image = Image.new("L", (SIDE, SIDE))
    corners = [
        (150 + radius * math.cos(math.pi * n / 5), 150 + radius * math.sin(math.pi * n / 5))
        for n in range(10)
        for radius in [130 if n % 2 == 0 else 55]
    ]
    ImageDraw.Draw(image).polygon(corners, fill=255)
    return np.asarray(image) > 127


def ring() -> np.ndarray:
    """A disc with a hole."""
    return disc() & ~disc(140, 160, 40)


def islands() -> np.ndarray:
    """A disc and a separate rectangle."""
    x, y = _middles()
    return disc(80, 90, 50) | ((x > 170) & (x < 280) & (y > 150) & (y < 240))


def wavy() -> np.ndarray:
    """A curve without corners or symmetry that touches two edges of the image."""
    x, y = _middles()
    angle = np.arctan2(y - 110, x - 120)
    far = 115 + 18 * np.sin(3 * angle) + 7 * np.sin(8 * angle + 1)
    return np.hypot(x - 120, y - 110) < far


SHAPES = {"disc": disc, "star": star, "ring": ring, "islands": islands, "wavy": wavy}


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Intersection over union."""
    return float((one & other).sum() / (one | other).sum())


def drawn(path: str, box: tuple[float, float, float, float], width: int, height: int) -> np.ndarray:
    """A renderer's mask of an SVG path in the unit square of a box."""
    import resvg_py

    x_min, y_min, x_max, y_max = box
    place = f"translate({x_min * width},{y_min * height})"
    stretch = f"scale({(x_max - x_min) * width},{(y_max - y_min) * height})"
    drawing = resvg_py.svg_to_bytes(
        svg_string=f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f'<path transform="{place} {stretch}" d="{path}"/></svg>',
        skip_system_fonts=True,
    )
    return np.asarray(Image.open(io.BytesIO(drawing)).getchannel("A")) > 127
