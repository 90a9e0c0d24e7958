"""Demonstration pictures at natural sizes with their truth: ``python -m legato_training.samples --out FOLDER``.

Only Noto (Apache-2.0) and Fluent (MIT) drawings, as these pictures may be committed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from legato_training.art_sets import ART_SETS
from legato_training.language import Narrator
from legato_training.lexicon import lexicon
from legato_training.scenes import Scene, SceneSampler
from legato_training.sprites import SIDE, SpriteBook, load_sprites
from legato_training.vocabulary import ROOT

SETS = ("noto", "fluent", "fluent-3d")
SIZES = ((640, 480), (1024, 768), (800, 800), (480, 640), (1280, 720))
SEED = 99_000_007


def draw(scene: Scene, book: SpriteBook, size: tuple[int, int]) -> Image.Image:
    """A scene over a gradient of its two background colours, drawn with PIL at full size."""
    width, height = size
    ramp = np.linspace(0, 1, height)[:, None, None]
    first, second = (0.35 + 0.65 * colour for colour in scene.background_colours)
    ground = np.broadcast_to(first + (second - first) * ramp * 0.6, (height, width, 3))
    canvas = Image.fromarray((ground * 255).astype(np.uint8)).convert("RGBA")
    scale = np.diag([width, height]).astype(float)
    for i in scene.paint_order:
        rgba = book.rgba[scene.sprites[i]].astype(np.float32)
        rgba[..., :3] *= scene.tints[i]
        back = np.linalg.inv(scale @ scene.matrices[i]) * SIDE
        shift = SIDE / 2 - back @ (scene.centres[i] * [width, height])
        layer = Image.fromarray(rgba.astype(np.uint8)).transform(
            size,
            Image.Transform.AFFINE,
            (*back[0], shift[0], *back[1], shift[1]),
            Image.Resampling.BICUBIC,
        )
        canvas.alpha_composite(layer)
    return canvas.convert("RGB")


def truth(scene: Scene) -> list[dict]:
    """Objects left to right: name and box, 0..1."""
    keys = ("x_min", "y_min", "x_max", "y_max")
    return [
        {"name": lexicon().kinds[kind].names[0]}
        | {k: round(float(v), 4) for k, v in zip(keys, box, strict=True)}
        for kind, box in zip(scene.kinds, scene.boxes, strict=True)
    ]


def scene_for(sampler: SceneSampler, size: tuple[int, int]) -> Scene:
    """A scene of two to six medium objects, its squeeze fitting the size of the picture."""
    squeeze = size[0] / size[1]
    while True:
        kinds = sampler.choose_kinds()
        if not 2 <= len(kinds) <= 6:
            continue
        scene = sampler.place(kinds, squeeze)
        sides = (scene.boxes[:, 2:] - scene.boxes[:, :2]).max(1)
        if (
            len(scene.kinds) == len(kinds)
            and sides.min() > 0.15
            and scene.covered.max() < 0.05
            and scene.inside.min() > 0.97
        ):
            return scene


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    book = load_sprites(options.pack)
    sampler = SceneSampler(
        book, tuple(i for i, art in enumerate(ART_SETS) if art.name in SETS), SEED
    )
    listed = []
    for number in range(options.count):
        size = SIZES[number % len(SIZES)]
        scene = scene_for(sampler, size)
        name = f"scene_{number}.jpg"
        draw(scene, book, size).save(options.out / name, quality=90)
        caption = Narrator(scene, sampler.rng).short()
        listed.append(
            {
                "file": name,
                "width": size[0],
                "height": size[1],
                "caption": caption,
                "objects": truth(scene),
            }
        )
    (options.out / "truth.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
