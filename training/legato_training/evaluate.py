"""Measure an exported model: ``python -m legato_training.evaluate --model FOLDER --out FILE``.

Fresh scenes with the trained drawing sets and, separately, with each held-out set: once as in
training, with the coloured shapes, which no set draws and training knows, and once without them.
Sprites keep their own colours; backgrounds and camera faults are as in training.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from legato_training.art_sets import ART_SETS
from legato_training.decode import Answer, Cache, Decoder
from legato_training.export import load_exported
from legato_training.language import Narrator
from legato_training.lexicon import Phrase
from legato_training.render import Renderer
from legato_training.scenes import SHAPE_SHARE, Scene, SceneSampler, render_arrays
from legato_training.scoring import Tally
from legato_training.slots import SlotBuilder
from legato_training.sprites import SpriteBook, load_sprites
from legato_training.vocabulary import ROOT, Words

EVAL_SEED = 77_000_001
MAX_ANSWERED = 12
NO_SHAPES = "without shapes"


def pixels(renderer: Renderer, scenes: list[Scene]) -> torch.Tensor:
    """Scenes drawn on the renderer's device."""
    arrays = [render_arrays(scene) for scene in scenes]
    batch = {
        k: torch.from_numpy(np.stack([a[k] for a in arrays])).to(renderer.device) for k in arrays[0]
    }
    return renderer.draw(batch, restyle=False)


class Examiner:
    """Asks every skill about batches of scenes of one group of drawing sets."""

    def __init__(
        self,
        book: SpriteBook,
        renderer: Renderer,
        decoder: Decoder,
        sets: tuple[int, ...],
        seed: int,
        shape_share: float = SHAPE_SHARE,
    ) -> None:
        self.sampler = SceneSampler(book, sets, seed, shape_share)
        self.words = Words()
        self.builder = SlotBuilder(self.sampler, self.words, np.random.default_rng(seed + 1))
        self.renderer, self.decoder, self.device = renderer, decoder, renderer.device
        self.tally = Tally(book)

    def examine(self, count: int) -> None:
        """One batch: every question once for every scene."""
        scenes: list[Scene] = []
        while len(scenes) < count:
            scene = self.sampler.sample()
            if scene.kinds:
                scenes.append(scene)
        words = self.sampler.lexicon
        narrators = [Narrator(scene, self.builder.rng, words) for scene in scenes]
        asked = [self.choose_phrase(n) for n in narrators]
        absent = [
            narrator.lexicon.phrases_of[self.sampler.absent_kind(set(narrator.members))][0]
            for narrator in narrators
        ]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            cache = self.decoder.read(pixels(self.renderer, scenes))
            self.detect(cache, scenes, asked, absent)
            self.point(cache, scenes, asked)
            self.segment(cache, scenes, asked)
            self.count(cache, scenes, asked)
            self.caption(cache, scenes)

    def choose_phrase(self, narrator: Narrator) -> Phrase:
        """Return the first name of a kind that is there."""
        kinds = list(narrator.members)
        return narrator.lexicon.phrases_of[kinds[self.builder.rng.integers(len(kinds))]][0]

    def ask(self, cache: Cache, skill: str, texts: list[str], limit: int) -> list[Answer]:
        """Answers to one prompt a scene."""
        prompts = [
            self.builder.prompt("query" if skill == "text" else skill, text) for text in texts
        ]
        return self.decoder.answer(cache, prompts, skill, limit)

    def detect(
        self, cache: Cache, scenes: list[Scene], asked: list[Phrase], absent: list[Phrase]
    ) -> None:
        """Boxes of something present, boxes of something absent."""
        answers = self.ask(cache, "detect", [" " + p.singular for p in asked], 3 * MAX_ANSWERED + 1)
        for scene, phrase, answer in zip(scenes, asked, answers, strict=True):
            self.tally.detect(scene, phrase, answer.boxes())
        for answer in self.ask(cache, "detect", [" " + p.singular for p in absent], 4):
            self.tally.invented(bool(answer.tokens))

    def point(self, cache: Cache, scenes: list[Scene], asked: list[Phrase]) -> None:
        """Points of something present."""
        answers = self.ask(cache, "point", [" " + p.singular for p in asked], 2 * MAX_ANSWERED + 1)
        for scene, phrase, answer in zip(scenes, asked, answers, strict=True):
            self.tally.point(scene, phrase, answer.points())

    def segment(self, cache: Cache, scenes: list[Scene], asked: list[Phrase]) -> None:
        """Outline of something there once and uncovered."""
        answers = self.ask(cache, "segment", [p.singular for p in asked], 54)
        back = {identity: number for number, identity in self.words.number.items()}
        for scene, phrase, answer in zip(scenes, asked, answers, strict=True):
            numbers = [back[t] for t in answer.tokens[3:] if t in back]
            self.tally.segment(scene, phrase, answer.boxes()[:1], numbers)

    def count(self, cache: Cache, scenes: list[Scene], asked: list[Phrase]) -> None:
        """How many, in words."""
        answers = self.ask(cache, "text", [f"How many {p.plural} are there?" for p in asked], 8)
        for scene, phrase, answer in zip(scenes, asked, answers, strict=True):
            self.tally.count(scene, phrase, self.words.decode(answer.tokens))

    def caption(self, cache: Cache, scenes: list[Scene]) -> None:
        """Nouns of the short caption."""
        prompt = self.words.templates()["caption"]["short"]
        for scene, answer in zip(
            scenes, self.decoder.answer(cache, [prompt] * len(scenes), "text", 48), strict=True
        ):
            self.tally.caption(scene, self.words.decode(answer.tokens))


def all_groups() -> dict[str, tuple[tuple[int, ...], float]]:
    """Drawing sets and the share of shapes, by the name of the group."""
    trained = tuple(i for i, art in enumerate(ART_SETS) if not art.held_out)
    groups = {"trained art": (trained, SHAPE_SHARE)}
    for i, art in enumerate(ART_SETS):
        if art.held_out:
            groups[art.name] = ((i,), SHAPE_SHARE)
            groups[f"{art.name} {NO_SHAPES}"] = ((i,), 0.0)
    return groups


def evaluate(
    model_folder: Path,
    pack: Path,
    names: list[str],
    scenes: int,
    batch: int,
    device: torch.device,
) -> dict[str, Any]:
    """Metrics of each named group."""
    book = load_sprites(pack)
    renderer = Renderer(book, device)
    decoder = Decoder(load_exported(model_folder).to(device))
    metrics = {}
    for name in names:
        sets, shape_share = all_groups()[name]
        torch.manual_seed(EVAL_SEED)
        begin = time.monotonic()
        examiner = Examiner(book, renderer, decoder, sets, EVAL_SEED, shape_share)
        for start in range(0, scenes, batch):
            examiner.examine(min(batch, scenes - start))
        metrics[name] = examiner.tally.metrics() | {
            "scenes": scenes,
            "seconds": round(time.monotonic() - begin, 1),
        }
        print(
            name,
            json.dumps({k: v for k, v in metrics[name].items() if k != "per_noun"}),
            flush=True,
        )
    return metrics


def table(metrics: dict[str, Any]) -> str:
    """Format a short markdown table."""
    rows = (
        "detect_f1",
        "detect_f1_small",
        "detect_f1_middle",
        "detect_f1_large",
        "point_hit",
        "invented",
        "count_to_5",
        "segment_iou",
        "caption_noun_f1",
    )
    lines = ["| metric | " + " | ".join(metrics) + " |", "| --- |" + " --- |" * len(metrics)]
    lines += [
        f"| {row} | " + " | ".join(f"{m[row]:.3f}" for m in metrics.values()) + " |" for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with model.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--scenes", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--group", action="append", choices=all_groups(), help="default: all")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    names = options.group or list(all_groups())
    metrics = evaluate(options.model, options.pack, names, options.scenes, options.batch, device)
    options.out.write_text(json.dumps(metrics, indent=1) + "\n")
    print(table(metrics))


if __name__ == "__main__":
    main()
