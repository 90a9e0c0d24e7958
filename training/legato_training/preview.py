"""Draw scenes with their labels, to look at: ``python -m legato_training.preview --out PNG``."""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from legato_training.art_sets import ART_SETS
from legato_training.config import COORD, SIZE
from legato_training.data import scene_loader
from legato_training.lexicon import lexicon
from legato_training.render import make_renderer
from legato_training.scenes import CROP, GRID
from legato_training.slots import DETECT_A, SEGMENT, SLOTS, STARTS
from legato_training.vocabulary import ROOT, Words


def to_image(pixels_3YX: torch.Tensor) -> Image.Image:
    """-1..1 -> image."""
    array = ((pixels_3YX.float().cpu() * 0.5 + 0.5) * 255).round().clamp(0, 255).byte()
    return Image.fromarray(array.permute(1, 2, 0).numpy())


def slot_text(words: Words, tokens: np.ndarray, targets: np.ndarray, slot: int) -> str:
    """Prompt and answer of a slot, readable."""
    start, end = STARTS[slot], STARTS[slot] + SLOTS[slot]
    answers = [int(t) for t in targets[start:end] if t >= 0]
    first = int(np.argmax(targets[start:end] >= 0)) if answers else 0
    prompt = [int(t) for t in tokens[start : start + first + 1]]
    return words.decode(prompt).strip() + " => " + words.decode(answers)


def draw_labels(image: Image.Image, sample: dict[str, np.ndarray], words: Words) -> Image.Image:
    """Boxes of the first detect slot (red), outline of the segment slot, patch labels (dots)."""
    pen = ImageDraw.Draw(image)
    for slot, colour in ((DETECT_A, "red"), (SEGMENT, "lime")):
        start, end = STARTS[slot], STARTS[slot] + SLOTS[slot]
        tokens, values = sample["tokens"][start:end], sample["values"][start:end]
        sizes = np.flatnonzero(tokens == SIZE)
        for s in sizes:
            assert tokens[s - 1] == COORD
            assert tokens[s - 2] == COORD
            cx, cy, (w, h) = values[s - 2, 0], values[s - 1, 0], values[s]
            corner = [
                (cx - w / 2) * CROP,
                (cy - h / 2) * CROP,
                (cx + w / 2) * CROP,
                (cy + h / 2) * CROP,
            ]
            pen.rectangle(corner, outline=colour)
            if slot == SEGMENT:
                back = {v: k for k, v in words.number.items()}
                numbers = (
                    np.array(
                        [back[int(t)] for t in tokens[s + 1 :] if int(t) in back], float
                    ).reshape(-1, 2)
                    / 960
                )
                points = [(corner[0] + x * w * CROP, corner[1] + y * h * CROP) for x, y in numbers]
                pen.line([*points, points[0]], fill="cyan", width=1)
    for i in np.flatnonzero(sample["patches"] < len(lexicon().kinds)):
        x, y = (i % GRID + 0.5) * 14, (i // GRID + 0.5) * 14
        pen.point([(x, y), (x + 1, y), (x, y + 1), (x + 1, y + 1)], fill="magenta")
    return image


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--bare", action="store_true", help="no labels over the pictures")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    book, renderer = make_renderer(options.pack, torch.device("cpu"), False)
    sets = tuple(i for i, a in enumerate(ART_SETS) if a.held_out == options.held_out)
    arrays = next(iter(scene_loader(book, sets, options.count, options.seed, 0)))
    batch = {key: torch.from_numpy(value) for key, value in arrays.items()}
    pictures = renderer.draw(batch, not options.plain, not options.plain)
    words = Words()
    columns = 4
    sheet = Image.new("RGB", (columns * CROP, -(-options.count // columns) * CROP))
    for i in range(options.count):
        sample = {key: value[i] for key, value in arrays.items()}
        image = to_image(pictures[i])
        image = image if options.bare else draw_labels(image, sample, words)
        sheet.paste(image, (i % columns * CROP, i // columns * CROP))
        print(
            i, [slot_text(words, sample["tokens"], sample["targets"], s) for s in range(len(SLOTS))]
        )
    sheet.save(options.out)


if __name__ == "__main__":
    main()
