"""An image with known content."""

from __future__ import annotations

from PIL import Image, ImageDraw


def shapes_picture() -> Image.Image:
    """640x480: two red circles and a blue square on a light background."""
    image = Image.new("RGB", (640, 480), (225, 225, 215))
    pen = ImageDraw.Draw(image)
    pen.ellipse((60, 60, 180, 180), fill=(215, 35, 35))
    pen.ellipse((420, 280, 540, 400), fill=(215, 35, 35))
    pen.rectangle((400, 60, 500, 160), fill=(40, 80, 215))
    return image
