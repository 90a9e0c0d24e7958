"""The sprite pack in memory: premultiplied RGBA for the renderer, small arrays for the sampler.

N sprites; level l of the pyramid has side SIDE >> l. Drawn shapes are added after the packed art,
white, so that a tint gives them their colour.
"""

import io
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from legato_training.lexicon import COLOUR_NAMES, SHAPES, lexicon

SIDE = 160
LEVELS = 4
THUMB = 32
SHAPE_SET = -1
DOMINANT_SHARE = 0.55
PHOTO_SIDE = 384


@dataclass(frozen=True)
class SpriteBook:
    """Everything about the sprites. ``colour`` is the dominant colour's index or -1."""

    rgba: np.ndarray  # uint8 [N, SIDE, SIDE, 4], straight alpha
    noun: np.ndarray  # int [N]; shapes: -1
    shape: np.ndarray  # int [N]; art: -1
    set: np.ndarray  # int [N]; shapes: SHAPE_SET
    outline: np.ndarray  # f32 [N, 64, 2]
    hull: np.ndarray  # f32 [N, 48, 2]
    share: np.ndarray  # f32 [N]
    thumb: np.ndarray  # bool [N, THUMB, THUMB]
    colour: np.ndarray  # int [N]
    photos: np.ndarray  # uint8 [M, P, P, 3]

    def of_kind(self, sets: tuple[int, ...]) -> list[list[np.ndarray]]:
        """For each kind a list over drawing sets of sprite indices, empty if they lack the kind."""
        book = lexicon()
        by_kind = []
        for index, kind in enumerate(book.kinds):
            if kind.shape >= 0:
                by_kind.append([np.flatnonzero(self.shape == kind.shape)])
                continue
            chosen = [np.flatnonzero((self.noun == index) & (self.set == s)) for s in sets]
            by_kind.append([c for c in chosen if len(c)])
        return by_kind


def decode_images(data: np.ndarray, offsets: np.ndarray, mode: str) -> np.ndarray:
    """Concatenated image files -> one uint8 array."""
    raw = data.tobytes()
    files = (raw[a:b] for a, b in pairwise(offsets))
    return np.stack([np.asarray(Image.open(io.BytesIO(f)).convert(mode)) for f in files])


def shape_polygon(name: str) -> np.ndarray:
    """Outline of one shape [P, 2] in -0.5..0.5, y down."""

    def regular(n: int, turn: float = -np.pi / 2) -> np.ndarray:
        angles = turn + 2 * np.pi * np.arange(n) / n
        return 0.5 * np.stack([np.cos(angles), np.sin(angles)], 1)

    if name == "star":
        points = regular(10)
        points[1::2] *= 0.42
        return points
    if name == "heart":
        t = np.linspace(0, 2 * np.pi, 96, endpoint=False)
        x = 16 * np.sin(t) ** 3
        y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
        return np.stack([x / 33, (y + 2) / 33], 1)
    corners = {
        "square": [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)],
        "triangle": [(0, -0.45), (0.5, 0.42), (-0.5, 0.42)],
        "diamond shape": [(0, -0.5), (0.36, 0), (0, 0.5), (-0.36, 0)],
        "cross": [
            (-0.17, -0.5),
            (0.17, -0.5),
            (0.17, -0.17),
            (0.5, -0.17),
            (0.5, 0.17),
            (0.17, 0.17),
            (0.17, 0.5),
            (-0.17, 0.5),
            (-0.17, 0.17),
            (-0.5, 0.17),
            (-0.5, -0.17),
            (-0.17, -0.17),
        ],
        "arrow": [
            (-0.5, -0.16),
            (0.06, -0.16),
            (0.06, -0.4),
            (0.5, 0),
            (0.06, 0.4),
            (0.06, 0.16),
            (-0.5, 0.16),
        ],
    }
    if name in corners:
        return np.array(corners[name])
    sides = {"pentagon": 5, "hexagon": 6}.get(name, 96)
    return regular(sides) * ([1.0, 0.62] if name == "oval" else [1.0, 1.0])


def draw_shape(name: str) -> tuple[np.ndarray, np.ndarray]:
    """White shape RGBA uint8 [SIDE, SIDE, 4] and its polygon in sprite units."""
    zoom, room = 4, (SIDE - 8) / SIDE
    polygon = shape_polygon(name) * room
    mask = Image.new("L", (SIDE * zoom, SIDE * zoom), 0)
    pen = ImageDraw.Draw(mask)
    pen.polygon([tuple(p) for p in (polygon + 0.5) * SIDE * zoom], fill=255)
    if name == "ring shape":
        pen.polygon([tuple(p) for p in (polygon * 0.55 + 0.5) * SIDE * zoom], fill=0)
    alpha = np.asarray(mask.resize((SIDE, SIDE), Image.Resampling.BOX))
    rgba = np.concatenate([np.full((SIDE, SIDE, 3), 255, np.uint8), alpha[..., None]], axis=2)
    return rgba, polygon


def dominant_colours(rgba: np.ndarray) -> np.ndarray:
    """Index of the colour that covers most of each sprite, -1 when none covers DOMINANT_SHARE."""
    small = rgba[:, ::5, ::5].reshape(len(rgba), -1, 4).astype(np.float32) / 255
    red, green, blue = small[..., 0], small[..., 1], small[..., 2]
    value, low = small[..., :3].max(2), small[..., :3].min(2)
    chroma = value - low
    safe = np.maximum(chroma, 1e-6)
    hue = (
        np.where(
            value == red,
            (green - blue) / safe % 6,
            np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
        )
        * 60
    )
    saturation = chroma / np.maximum(value, 1e-6)
    grey = (saturation < 0.15) | (chroma < 0.08)
    warm = ~grey & ((hue < 50) | (hue > 340))
    brown = warm & (hue > 12) & (hue < 48) & (value < 0.66)
    pink = (
        ~grey
        & ~brown
        & (((hue > 300) & (hue <= 342)) | ((hue > 342) | (hue < 12)) & (saturation < 0.55))
        & (value > 0.6)
    )
    names = {
        "black": grey & (value < 0.3),
        "gray": grey & (value >= 0.3) & (value < 0.82),
        "white": grey & (value >= 0.82),
        "brown": brown,
        "pink": pink,
    }
    rest = ~grey & ~brown & ~pink
    for name, start, end in (
        ("red", -1, 14),
        ("orange", 14, 42),
        ("yellow", 42, 66),
        ("green", 66, 165),
        ("blue", 165, 252),
        ("purple", 252, 335),
        ("red", 335, 361),
    ):
        names[name] = names.get(name, False) | (rest & (hue >= start) & (hue < end))
    weight = (small[..., 3] > 0.5).astype(np.float32)
    shares = (
        np.stack([(names[n] * weight).sum(1) for n in COLOUR_NAMES], 1)
        / np.maximum(weight.sum(1), 1)[:, None]
    )
    best = shares.argmax(1)
    return np.where(shares.max(1) >= DOMINANT_SHARE, best, -1)


def shape_sprites() -> SpriteBook:
    """Return the drawn shapes alone, white, over one black photograph; needs no download."""
    drawn = [draw_shape(name) for name in SHAPES]
    rgba = np.stack([pixels for pixels, _ in drawn])
    polygons = [p if is_clockwise(p) else p[::-1] for _, p in drawn]
    count = len(drawn)
    return SpriteBook(
        rgba=rgba,
        noun=np.full(count, -1),
        shape=np.arange(count),
        set=np.full(count, SHAPE_SET),
        outline=np.stack([resample_closed(p, OUTLINE_POINTS) for p in polygons]).astype(np.float32),
        hull=np.stack([fit_hull(p) for p in polygons]).astype(np.float32),
        share=np.ones(count, np.float32),
        thumb=thumbnails(rgba),
        colour=np.full(count, -1),
        photos=np.zeros((1, PHOTO_SIDE, PHOTO_SIDE, 3), np.uint8),
    )


def load_sprites(path: Path) -> SpriteBook:
    """Read the pack and add the drawn shapes."""
    pack, shapes = np.load(path), shape_sprites()
    art = decode_images(pack["sprite_bytes"], pack["sprite_offsets"], "RGBA")
    return SpriteBook(
        rgba=np.concatenate([art, shapes.rgba]),
        noun=np.concatenate([pack["noun"].astype(int), shapes.noun]),
        shape=np.concatenate([np.full(len(art), -1), shapes.shape]),
        set=np.concatenate([pack["set"].astype(int), shapes.set]),
        outline=np.concatenate([pack["outline"].astype(np.float32), shapes.outline]),
        hull=np.concatenate([pack["hull"].astype(np.float32), shapes.hull]),
        share=np.concatenate([pack["share"], shapes.share]),
        thumb=np.concatenate([thumbnails(art), shapes.thumb]),
        colour=np.concatenate([dominant_colours(art), shapes.colour]),
        photos=decode_images(pack["photo_bytes"], pack["photo_offsets"], "RGB"),
    )


def thumbnails(rgba: np.ndarray) -> np.ndarray:
    """Which of THUMB x THUMB blocks of each sprite are covered, bool."""
    block = SIDE // THUMB
    blocks = rgba[..., 3].reshape(-1, THUMB, block, THUMB, block)
    covered: np.ndarray = blocks.mean((2, 4)) > 127
    return covered


def pyramid(rgba: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Premultiplied pyramid as one int32 array (A B G R bytes, R lowest) and each level's start.

    Sprite n of level l, pixel (y, x) sits at start[l] + (n * side + y) * side + x.
    """
    levels: list[list[np.ndarray]] = [[] for _ in range(LEVELS)]
    for part in np.array_split(rgba, max(1, len(rgba) // 128)):
        pixels = part.astype(np.float32)
        pixels[..., :3] *= pixels[..., 3:] / 255
        for level in levels:
            packed = np.ascontiguousarray(np.rint(pixels).astype(np.uint8)).view(np.int32)[..., 0]
            level.append(packed.reshape(-1))
            n, side = pixels.shape[:2]
            pixels = pixels.reshape(n, side // 2, 2, side // 2, 2, 4).mean((2, 4))
    flat = [np.concatenate(level) for level in levels]
    return np.concatenate(flat), np.cumsum([0, *(len(level) for level in flat[:-1])]).astype(
        np.int64
    )


# ---------------------------------------------------------------- outlines
# Outlines and hulls of sprite alpha, in unit sprite coordinates (-0.5..0.5, y down).

OUTLINE_POINTS = 64
HULL_POINTS = 48
BRIDGE = 3


def resample_closed(points_P2: np.ndarray, count: int) -> np.ndarray:
    """``count`` points evenly spaced along a closed polygon, starting at its first point."""
    closed = np.concatenate([points_P2, points_P2[:1]])
    steps = np.hypot(*np.diff(closed, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0.0, along[-1], count, endpoint=False)
    return np.stack([np.interp(wanted, along, closed[:, axis]) for axis in (0, 1)], axis=1)


def is_clockwise(points_P2: np.ndarray) -> bool:
    """Clockwise as seen on screen, where y grows downwards."""
    x, y = points_P2.T
    return float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y)) > 0


def trace_outline(alpha: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None, float]:
    """Alpha, uint8 [S,S] -> outline [64,2] clockwise, hull [48,2], share of the area outlined."""
    from scipy import ndimage  # art script only
    from scipy.spatial import ConvexHull
    from skimage.measure import find_contours

    side = alpha.shape[0]
    mask = alpha > 127
    labels, count = ndimage.label(ndimage.binary_closing(np.pad(mask, BRIDGE), iterations=BRIDGE))
    if count == 0:
        return None, None, 0.0
    sizes = ndimage.sum_labels(np.ones_like(labels), labels, range(1, count + 1))
    largest = ndimage.binary_fill_holes(labels == int(np.argmax(sizes)) + 1)
    contour = max(find_contours(np.pad(largest, 1).astype(float), 0.5), key=len)
    outline = (contour[:-1, ::-1] - 1 - BRIDGE + 0.5) / side - 0.5
    if not is_clockwise(outline):
        outline = outline[::-1]
    rows, columns = np.nonzero(mask)
    corners = np.concatenate(
        [np.stack([columns + dx, rows + dy], 1) for dx in (0, 1) for dy in (0, 1)]
    )
    hull = corners[ConvexHull(corners).vertices] / side - 0.5
    return (
        resample_closed(outline, OUTLINE_POINTS),
        fit_hull(hull),
        float(np.max(sizes) / np.sum(sizes)),
    )


def fit_hull(hull_P2: np.ndarray) -> np.ndarray:
    """Reduce a convex hull to HULL_POINTS support points, or repeat its last one that often."""
    if len(hull_P2) > HULL_POINTS:
        angles = np.linspace(0, 2 * np.pi, HULL_POINTS, endpoint=False)
        directions = np.stack([np.cos(angles), np.sin(angles)])
        hull_P2 = hull_P2[np.argmax(hull_P2 @ directions, axis=0)]
    return np.concatenate([hull_P2, np.repeat(hull_P2[-1:], HULL_POINTS - len(hull_P2), axis=0)])
