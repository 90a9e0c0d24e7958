"""Draw the sample images and their truth: ``python -m legato_training.samples --out FOLDER``.

Compositions made by hand, at natural sizes, of Fluent drawings (MIT) from their vectors, so these
images may be committed. ``legato_training.art`` downloads the drawings.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from legato_training.art import rasterise, svg_of
from legato_training.art_sets import ART_SETS, find_icon
from legato_training.lexicon import all_nouns

ART = next(art for art in ART_SETS if art.name == "fluent")
SHARPNESS = 1024
SHADOW = 0.28
QUALITY = 88

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Item:
    """A drawing: its label, its centre and longer side in pixels, degrees against the clock."""

    label: str
    x: int
    y: int
    side: int
    turn: float = 0.0


@dataclass(frozen=True)
class Picture:
    """One file: a ground that runs from ``top`` to ``bottom``, over ``hill`` where there is one."""

    file: str
    size: tuple[int, int]
    top: Colour
    bottom: Colour
    items: tuple[Item, ...]
    hill: tuple[Colour, Colour] | None = None


PICTURES = (
    Picture(
        "scene.jpg",
        (1024, 768),
        (126, 190, 240),
        (232, 244, 252),
        (
            Item("deciduous tree", 450, 310, 330),
            Item("balloon", 190, 170, 250, -6),
            Item("dog", 190, 505, 280),
            Item("bicycle", 820, 440, 350),
            Item("red apple", 520, 650, 130, 8),
            Item("red apple", 665, 668, 120, -10),
        ),
        ((150, 205, 110), (94, 160, 76)),
    ),
    Picture(
        "fruit.jpg",
        (640, 480),
        (252, 238, 214),
        (240, 205, 160),
        (
            Item("strawberry", 110, 120, 130, 8),
            Item("strawberry", 300, 330, 140, -6),
            Item("strawberry", 500, 130, 130),
            Item("lemon", 540, 360, 150),
            Item("pineapple", 115, 350, 190),
        ),
    ),
    Picture(
        "street.jpg",
        (800, 450),
        (190, 205, 222),
        (238, 240, 244),
        (
            Item("bus", 190, 240, 260),
            Item("tractor", 480, 270, 200),
            Item("vertical traffic light", 690, 200, 220),
        ),
        ((140, 144, 152), (98, 102, 112)),
    ),
    Picture(
        "space.webp",
        (480, 640),
        (22, 24, 66),
        (84, 58, 128),
        (
            Item("rocket", 150, 180, 200),
            Item("ringed planet", 340, 400, 220),
            Item("alien", 120, 520, 140),
        ),
    ),
    Picture(
        "desk.png",
        (640, 480),
        (224, 236, 240),
        (184, 208, 220),
        (
            Item("laptop", 200, 280, 260),
            Item("hot beverage", 450, 350, 150),
            Item("camera", 500, 130, 170),
        ),
    ),
)


def ramp(size: tuple[int, int], top: Colour, bottom: Colour) -> Image.Image:
    """Draw a vertical gradient."""
    share = np.linspace(0, 1, size[1])[:, None, None]
    rows = np.array(top) * (1 - share) + np.array(bottom) * share
    return Image.fromarray(np.broadcast_to(rows, (size[1], size[0], 3)).round().astype(np.uint8))


def ground(picture: Picture) -> Image.Image:
    """Draw the image before anything is put into it."""
    sky = ramp(picture.size, picture.top, picture.bottom)
    if picture.hill is None:
        return sky
    width, height = picture.size
    x, y = np.meshgrid(np.arange(width) / width, np.arange(height) / height)
    pixels_below = height * (y - 0.66 + 0.07 * np.sin(np.pi * (0.15 + 0.8 * x)))
    edge = Image.fromarray((np.clip(pixels_below + 0.5, 0, 1) * 255).astype(np.uint8))
    return Image.composite(ramp(picture.size, *picture.hill), sky, edge)


def layer(picture: Picture, item: Item, icons: dict[str, Any]) -> Image.Image:
    """Return a drawing alone, RGBA of the image's size."""
    names = set(icons["icons"]) | set(icons.get("aliases", {}))
    icon = find_icon(ART, item.label, names)
    assert icon is not None, item.label
    drawn = rasterise(svg_of(icons, icon), SHARPNESS)
    drawn = drawn.rotate(item.turn, Image.Resampling.BICUBIC, expand=True)
    drawn = drawn.crop(drawn.getchannel("A").getbbox())
    scale = item.side / max(drawn.size)
    width, height = (round(side * scale) for side in drawn.size)
    sheet = Image.new("RGBA", picture.size, (0, 0, 0, 0))
    corner = (item.x - width // 2, item.y - height // 2)
    sheet.paste(drawn.resize((width, height), Image.Resampling.LANCZOS), corner)
    return sheet


def shadow(drawing: Image.Image) -> Image.Image:
    """Return a soft dark copy, a little lower."""
    dark = drawing.getchannel("A").filter(ImageFilter.GaussianBlur(9)).point(lambda a: a * SHADOW)
    sheet = Image.new("RGBA", drawing.size, (10, 20, 30, 0))
    lowered = Image.new("L", drawing.size, 0)
    lowered.paste(dark, (3, 8))
    sheet.putalpha(lowered)
    return sheet


def box_of(drawing: Image.Image) -> list[float]:
    """Left, top, right, bottom of what is more than half opaque, 0..1."""
    solid = drawing.getchannel("A").point(lambda a: 255 * (a > 127))
    bounds = solid.getbbox()
    assert bounds is not None  # a drawing is never empty
    width, height = drawing.size
    sides = (width, height, width, height)
    return [round(edge / side, 4) for edge, side in zip(bounds, sides, strict=True)]


def draw(
    picture: Picture, icons: dict[str, Any]
) -> tuple[Image.Image, dict[str, list[list[float]]]]:
    """Draw the image; return it with its boxes by noun from left to right."""
    noun_of = {label: noun.names[0] for noun in all_nouns() for label in noun.labels}
    canvas = ground(picture).convert("RGBA")
    boxes: dict[str, list[list[float]]] = {}
    for item in picture.items:
        drawing = layer(picture, item, icons)
        canvas.alpha_composite(shadow(drawing))
        canvas.alpha_composite(drawing)
        boxes.setdefault(noun_of[item.label], []).append(box_of(drawing))
    ordered = {noun: sorted(found, key=lambda b: b[0] + b[2]) for noun, found in boxes.items()}
    return canvas.convert("RGB"), ordered


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "legato-art")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    icons = json.loads((options.work / "node_modules" / ART.package / "icons.json").read_text())
    truth = {}
    for picture in PICTURES:
        image, truth[picture.file] = draw(picture, icons)
        image.save(options.out / picture.file, quality=QUALITY, optimize=True)
    (options.out / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
