"""A sheet of fresh scenes with the model's own answers drawn over them, to look at after a run."""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from legato_training.art_sets import ART_SETS
from legato_training.decode import Decoder
from legato_training.evaluate import Examiner, pixels
from legato_training.export import load_exported
from legato_training.language import Narrator
from legato_training.preview import to_image
from legato_training.render import Renderer
from legato_training.scenes import CROP
from legato_training.sprites import load_sprites
from legato_training.vocabulary import PATH_BOX, ROOT

COLUMNS = 4
SEED = 88_000_003


def draw_answers(examiner: Examiner, count: int) -> Image.Image:
    """Boxes (red) and the outline (lime) of one asked phrase, the caption printed below."""
    scenes = [examiner.sampler.sample() for _ in range(count)]
    scenes = [scene for scene in scenes if scene.kinds]
    words = examiner.sampler.lexicon
    narrators = [Narrator(scene, examiner.builder.rng, words) for scene in scenes]
    asked = [examiner.choose_phrase(narrator) for narrator in narrators]
    drawn = pixels(examiner.renderer, scenes)
    cache = examiner.decoder.read(drawn)
    boxes = examiner.ask(cache, "detect", [" " + p.singular for p in asked], 37)
    outlines = examiner.ask(cache, "segment", [p.singular for p in asked], 54)
    captions = examiner.decoder.answer(
        cache, [examiner.words.templates()["caption"]["normal"]] * len(scenes), "text", 60
    )
    back = {identity: number for number, identity in examiner.words.number.items()}
    sheet = Image.new("RGB", (COLUMNS * CROP, -(-len(scenes) // COLUMNS) * (CROP + 40)), "white")
    for i, phrase in enumerate(asked):
        image = to_image(drawn[i])
        pen = ImageDraw.Draw(image)
        for box in boxes[i].boxes():
            pen.rectangle(
                [
                    min(box[0], box[2]) * CROP,
                    min(box[1], box[3]) * CROP,
                    box[2] * CROP,
                    box[3] * CROP,
                ],
                outline="red",
            )
        for x0, y0, x1, y1 in outlines[i].boxes()[:1]:
            numbers = [back[t] for t in outlines[i].tokens[3:] if t in back]
            points = np.array(numbers[: len(numbers) // 2 * 2], float).reshape(-1, 2) / PATH_BOX
            corners = [
                ((x0 + px * (x1 - x0)) * CROP, (y0 + py * (y1 - y0)) * CROP) for px, py in points
            ]
            if len(corners) > 1:
                pen.line([*corners, corners[0]], fill="lime", width=1)
        left, top = i % COLUMNS * CROP, i // COLUMNS * (CROP + 40)
        sheet.paste(image, (left, top))
        caption = examiner.words.decode(captions[i].tokens)
        lines = [
            f"? {phrase.singular}",
            *(caption[j : j + 56] for j in range(0, min(len(caption), 112), 56)),
        ]
        ImageDraw.Draw(sheet).text(
            (left + 3, top + CROP + 1), "\n".join(lines), fill="black", font_size=10
        )
    return sheet


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    book = load_sprites(options.pack)
    decoder = Decoder(load_exported(options.model).to(device))
    renderer = Renderer(book, device)
    sheets = []
    for held_out in (False, True):
        torch.manual_seed(SEED)
        sets = tuple(i for i, art in enumerate(ART_SETS) if art.held_out == held_out)
        sheets.append(draw_answers(Examiner(book, renderer, decoder, sets, SEED), options.count))
    whole = Image.new("RGB", (sheets[0].width, sum(s.height for s in sheets)))
    whole.paste(sheets[0], (0, 0))
    whole.paste(sheets[1], (0, sheets[0].height))
    whole.save(options.out)


if __name__ == "__main__":
    main()
