"""Answers drawn onto their image. Needs Pillow (`pip install "legato[cli]"`).

Everything is drawn on a transparent layer of twice the size and scaled down onto the image,
which is what smooths lines and text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from PIL import Image, ImageDraw, ImageFont

from legato_client._errors import LegatoError
from legato_client._images.pillow import open_upright
from legato_client._images.sources import ImageInput
from legato_client._types.results import Detection, Mark, Outline, PointedObject, Result, rings_of
from legato_client._types.server import FrameResult

# Bright on dark and on light ground, and apart from each other for most colour-blind readers.
PALETTE = (
    (0, 158, 255),
    (255, 122, 0),
    (46, 189, 89),
    (233, 69, 148),
    (255, 196, 0),
    (137, 99, 255),
    (0, 191, 179),
    (214, 69, 48),
)
FAINT = 0.4  # opacity
_SMOOTHING = 2
_READABLE_SIDE = 640  # pixels; smaller images are enlarged so that labels do not hide them
_FILL_ALPHA = 84
_INK, _PAPER = (24, 26, 31), (250, 250, 248)


def marks_of(result: Result | FrameResult | LegatoError) -> tuple[Mark, ...]:
    """Return a result's places in the image; text and failed tasks have none."""
    outcome = result.outcome if isinstance(result, FrameResult) else result
    return () if isinstance(outcome, LegatoError) else outcome.marks


def annotate(
    image: ImageInput,
    marks: Iterable[Mark] | Result | FrameResult = (),
    *,
    lines: Iterable[str] = (),
    faint: Iterable[Mark] = (),
) -> Image.Image:
    """Draw boxes, points and outlines on a copy of the image, and lines of text below it.

    `marks` may be a result, whose marks are drawn; `faint` ones are drawn below them. Marks of
    one label share a colour. An outline whose path cannot be read shows its box.
    Raises TypeError for a `CachedImage`, whose pixels only the server has.
    """
    drawing = _readable(image).convert("RGB")
    marks = list(marks if isinstance(marks, Iterable) else marks_of(marks))
    below = list(faint)
    labels = list(dict.fromkeys(mark.label for mark in (*marks, *below)))
    for some, opacity in ((below, FAINT), (marks, 1.0)):
        if some:
            drawing = _with_marks(drawing, some, labels, opacity)
    text = list(lines)
    return _with_text(drawing, text) if text else drawing


def _with_marks(
    image: Image.Image, marks: list[Mark], labels: list[str], opacity: float
) -> Image.Image:
    layer = _Layer(image.size)
    order = (Outline, Detection, PointedObject)  # so that nothing small is hidden
    for mark in sorted(marks, key=lambda mark: order.index(type(mark))):
        layer.draw(mark, PALETTE[labels.index(mark.label) % len(PALETTE)])
    drawn = layer.flattened()
    drawn.putalpha(drawn.getchannel("A").point(lambda alpha: round(alpha * opacity)))
    return Image.alpha_composite(image.convert("RGBA"), drawn).convert("RGB")


def _readable(image: ImageInput) -> Image.Image:
    """Return the image upright; enlarge a small one by a whole factor."""
    upright = open_upright(image)
    factor = max(1, round(_READABLE_SIDE / max(upright.size)))
    if factor == 1:
        return upright
    size = (upright.width * factor, upright.height * factor)
    return upright.resize(size, Image.Resampling.LANCZOS)


class _Layer:
    """The transparent layer over an image."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = size
        self._width, self._height = size[0] * _SMOOTHING, size[1] * _SMOOTHING
        self._image = Image.new("RGBA", (self._width, self._height))
        self._pen = ImageDraw.Draw(self._image)
        self._stroke = max(2, min(size) // 200) * _SMOOTHING
        self._font = ImageFont.load_default(max(13, min(size) // 34) * _SMOOTHING)

    def draw(self, mark: Mark, colour: tuple[int, int, int]) -> None:
        match mark:
            case Detection():
                self._box(mark, colour)
            case PointedObject():
                self._point(mark, colour)
            case Outline():
                self._outline(mark, colour)

    def flattened(self) -> Image.Image:
        return self._image.resize(self._size, Image.Resampling.LANCZOS)

    def _box(self, mark: Detection | Outline, colour: tuple[int, int, int]) -> None:
        left, top, right, bottom = mark.box.to_pixels(self._width - 1, self._height - 1)
        # A line, not a rectangle: it is centred on the edge, so a flat box still shows.
        corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
        self._pen.line(corners, fill=(*colour, 255), width=self._stroke, joint="curve")
        self._label(mark.label, left, top, colour)

    def _point(self, mark: PointedObject, colour: tuple[int, int, int]) -> None:
        x, y = mark.point.to_pixels(self._width - 1, self._height - 1)
        radius = self._stroke * 2.5
        for size, fill in ((radius + self._stroke, (255, 255, 255)), (radius, colour)):
            self._pen.ellipse((x - size, y - size, x + size, y + size), fill=(*fill, 255))
        self._label(mark.label, x + 2 * radius, y, colour)

    def _outline(self, mark: Outline, colour: tuple[int, int, int]) -> None:
        rings = rings_of(mark)
        if not rings:
            self._box(mark, colour)
            return
        for ring in rings:
            corners = [point.to_pixels(self._width - 1, self._height - 1) for point in ring]
            self._pen.polygon(corners, fill=(*colour, _FILL_ALPHA))
            self._pen.line(
                [*corners, corners[0]], fill=(*colour, 255), width=self._stroke, joint="curve"
            )
        left, top, _, _ = mark.box.to_pixels(self._width - 1, self._height - 1)
        self._label(mark.label, left, top, colour)

    def _label(self, text: str, x: float, y: float, colour: tuple[int, int, int]) -> None:
        """Draw `text` on (x, y), moved inside the image."""
        if not text:
            return
        pad = self._stroke + 2 * _SMOOTHING
        _, _, width, height = self._pen.textbbox((0, 0), text, font=self._font)
        chip_width, chip_height = width + 2 * pad, height + 2 * pad
        left = min(max(0.0, x), max(0.0, self._width - chip_width))
        top = min(max(0.0, y - chip_height), max(0.0, self._height - chip_height))
        self._pen.rounded_rectangle(
            (left, top, left + chip_width, top + chip_height), radius=pad, fill=(*colour, 235)
        )
        red, green, blue = colour
        ink = _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _PAPER  # luminance
        self._pen.text((left + pad, top + pad), text, font=self._font, fill=(*ink, 255))


def _with_text(image: Image.Image, lines: list[str]) -> Image.Image:
    """Return the image above a panel of wrapped text."""
    size = max(14, image.width // 44)
    font = ImageFont.load_default(size)
    margin, line_height = size, round(size * 1.45)
    columns = max(8, int((image.width - 2 * margin) / (font.getlength("n" * 40) / 40)))
    wrapped = [piece for line in lines for piece in textwrap.wrap(line, columns) or [""]]
    panel_height = line_height * len(wrapped) + 2 * margin
    page = Image.new("RGB", (image.width, image.height + panel_height), _PAPER)
    page.paste(image, (0, 0))
    pen = ImageDraw.Draw(page)
    for number, line in enumerate(wrapped):
        pen.text((margin, image.height + margin + number * line_height), line, font=font, fill=_INK)
    return page
