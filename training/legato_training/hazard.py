"""Teach legato-tiny a word: ``python -m legato_training.hazard --out hazard.safetensors``.

A yellow triangle becomes a "hazard": to detect, to point at, to count, in captions. The scenes are
the drawn shapes alone, so nothing is downloaded; a CPU of two cores takes a quarter of an hour.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from legato_training.config import ModelConfig
from legato_training.draft import add_adapter, save_adapter
from legato_training.export import load_exported
from legato_training.lexicon import COLOUR_NAMES, SHAPES, Lexicon, Phrase, lexicon
from legato_training.model import LegatoTiny, slot_mask
from legato_training.render import Renderer
from legato_training.scenes import ShapeSampler, render_arrays
from legato_training.slots import SLOTS, Packed, SlotBuilder, region_targets
from legato_training.sprites import SpriteBook, shape_sprites
from legato_training.train import region_losses, token_loss
from legato_training.vocabulary import ROOT, Words

WORD, PLURAL = "hazard", "hazards"
SHAPE, COLOUR = SHAPES.index("triangle"), COLOUR_NAMES.index("yellow")
SHARE = 0.3  # of the objects, and of the words that ask for what is not there
LOG_EVERY = 10

Arrays = dict[str, Tensor]


def hazard_kind() -> int:
    """Return the kind that gets the new name."""
    kinds = lexicon().kinds
    return next(i for i, k in enumerate(kinds) if (k.shape, k.colour) == (SHAPE, COLOUR))


def hazard_lexicon() -> Lexicon:
    """Return the one lexicon, in which yellow triangles are hazards first."""
    book, at = lexicon(), hazard_kind()
    kinds, phrases = list(book.kinds), list(book.phrases_of)
    old = kinds[at]
    kinds[at] = dataclasses.replace(
        old, names=(WORD, *old.names), plurals=(PLURAL, *old.plurals), colour=-1
    )
    phrases[at] = (Phrase(WORD, PLURAL, frozenset([at])), *book.phrases_of[at])
    return dataclasses.replace(book, kinds=tuple(kinds), phrases_of=tuple(phrases))


class HazardSampler(ShapeSampler):
    """Scenes of shapes, many of them hazards."""

    def __init__(self, book: SpriteBook, seed: int) -> None:
        super().__init__(book, seed, words=hazard_lexicon())
        self.hazard = hazard_kind()

    def random_kind(self) -> int:
        """Return a hazard, or any shape in any colour."""
        return self.hazard if self.rng.random() < SHARE else super().random_kind()

    def tints(self, kinds: list[int], sprites: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """As ever: a new name does not change the colour of a thing."""
        named, self.lexicon = self.lexicon, lexicon()
        try:
            return super().tints(kinds, sprites)
        finally:
            self.lexicon = named


def batches(model: LegatoTiny, options: argparse.Namespace) -> Iterator[tuple[Tensor, Arrays]]:
    """Image embeddings of scenes and their slots; an image comes several times, asked anew."""
    book = shape_sprites()
    sampler = HazardSampler(book, options.seed)
    builder = SlotBuilder(sampler, Words(), np.random.default_rng(options.seed + 1))
    renderer = Renderer(book, torch.device("cpu"))
    while True:
        scenes = [sampler.sample() for _ in range(options.batch)]
        pixels = renderer.draw(stacked([render_arrays(scene) for scene in scenes]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            image = model.vision(pixels)
        for _ in range(options.reuse):
            yield image, stacked([slot_arrays(builder.build(scene)) for scene in scenes])


def slot_arrays(packed: Packed) -> dict[str, np.ndarray]:
    """Return what the losses read of a scene's slots."""
    own = {"tokens": packed.tokens, "values": packed.values, "targets": packed.targets}
    return own | region_targets(packed)


def stacked(rows: list[dict[str, np.ndarray]]) -> Arrays:
    """Arrays of several scenes as tensors of one batch."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def loss_of(model: LegatoTiny, image: Tensor, batch: Arrays, mask: tuple[Tensor, Tensor]) -> Tensor:
    """Tokens, coordinates and sizes, weighted as when the model was made."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.decode(image, batch["tokens"].long(), batch["values"], *mask)
        coord, size = region_losses(model, hidden, batch)
        return token_loss(model, hidden, batch["targets"]) + coord + 0.5 * size


def train(model: LegatoTiny, options: argparse.Namespace) -> None:
    """Train some steps, their rate falling to nothing."""
    trained = add_adapter(model, options.rank)
    optimiser = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    mask = slot_mask(SLOTS, ModelConfig().prefix)
    losses: list[float] = []
    for step, (image, batch) in enumerate(islice(batches(model, options), options.steps)):
        loss = loss_of(model, image, batch, mask)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 20) * (1 - step / options.steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if (step + 1) % LOG_EVERY == 0:
            print(f"step {step + 1} loss {np.mean(losses[-LOG_EVERY:]):.4f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT.parent / "engine/tiny/legato_tiny")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--reuse", type=int, default=3, help="times that a picture is asked about")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = load_exported(options.model)
    train(model, options)
    save_adapter(model, options.out)


if __name__ == "__main__":
    main()
