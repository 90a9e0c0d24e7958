"""Draw scenes, to look at: ``python -m legato_training.preview --out PNG``.

Their labels are drawn over them or, with ``--model``, that model's own answers.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from legato_training.art_sets import ART_SETS
from legato_training.config import COORD, SIZE
from legato_training.decode import Decoder
from legato_training.evaluate import Examiner, pixels
from legato_training.export import load_exported
from legato_training.language import Narrator
from legato_training.lexicon import lexicon
from legato_training.render import Renderer, make_renderer
from legato_training.scenes import CROP, GRID
from legato_training.slots import DETECT_A, SEGMENT, SLOTS, STARTS, scene_loader
from legato_training.sprites import load_sprites
from legato_training.vocabulary import PATH_BOX, ROOT, Words

COLUMNS = 4


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
    parser.add_argument("--count", type=int, help="default: 12, of answers 8 a sheet")
    labels = parser.add_argument_group("labels")
    labels.add_argument("--seed", type=int, default=0)
    labels.add_argument("--held-out", action="store_true")
    labels.add_argument("--plain", action="store_true")
    labels.add_argument("--bare", action="store_true", help="no labels over the pictures")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--model", type=Path, help="draw the answers of this exported model")
    answers.add_argument("--cpu", action="store_true", help="answer without a GPU")
    options = parser.parse_args()
    if options.model is not None:
        device = torch.device("cpu" if options.cpu else "cuda")
        sheet_of_answers(options.model, options.pack, options.count or 8, device).save(options.out)
        return
    count = options.count or 12
    torch.manual_seed(options.seed)
    book, renderer = make_renderer(options.pack, torch.device("cpu"), False)
    sets = tuple(i for i, a in enumerate(ART_SETS) if a.held_out == options.held_out)
    arrays = next(iter(scene_loader(book, sets, count, options.seed, 0)))
    batch = {key: torch.from_numpy(value) for key, value in arrays.items()}
    pictures = renderer.draw(batch, not options.plain, not options.plain)
    words = Words()
    sheet = Image.new("RGB", (COLUMNS * CROP, -(-count // COLUMNS) * CROP))
    for i in range(count):
        sample = {key: value[i] for key, value in arrays.items()}
        image = to_image(pictures[i])
        image = image if options.bare else draw_labels(image, sample, words)
        sheet.paste(image, (i % COLUMNS * CROP, i // COLUMNS * CROP))
        print(
            i, [slot_text(words, sample["tokens"], sample["targets"], s) for s in range(len(SLOTS))]
        )
    sheet.save(options.out)


# ---------------------------------------------------------------- answers
# The model's own answers drawn over fresh scenes, to look at after a run.

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


def sheet_of_answers(model: Path, pack: Path, count: int, device: torch.device) -> Image.Image:
    """Draw a model's answers about the trained drawing sets and, below, the held-out ones."""
    book = load_sprites(pack)
    decoder = Decoder(load_exported(model).to(device))
    renderer = Renderer(book, device)
    sheets = []
    for held_out in (False, True):
        torch.manual_seed(SEED)
        sets = tuple(i for i, art in enumerate(ART_SETS) if art.held_out == held_out)
        sheets.append(draw_answers(Examiner(book, renderer, decoder, sets, SEED), count))
    whole = Image.new("RGB", (sheets[0].width, sum(s.height for s in sheets)))
    whole.paste(sheets[0], (0, 0))
    whole.paste(sheets[1], (0, sheets[0].height))
    return whole


if __name__ == "__main__":
    main()
