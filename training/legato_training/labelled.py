"""Write fresh scenes as a labelled folder: ``python -m legato_training.labelled --out FOLDER``.

The folder has PNGs and `annotations.json` in COCO's form. A category is a noun or a coloured
shape; a scene's objects of a kind are its annotations, boxes in pixels. Half of the scenes are of
the trained sets, half of Twemoji, which was never trained on; with ``--shapes`` all are of coloured
shapes alone, which need no pack of drawings.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from legato_training.art_sets import ART_SETS
from legato_training.evaluate import all_groups, pixels
from legato_training.lexicon import lexicon
from legato_training.preview import to_image
from legato_training.render import Renderer
from legato_training.scenes import CROP, Scene, SceneSampler, ShapeSampler
from legato_training.sprites import SpriteBook, load_sprites, shape_sprites
from legato_training.vocabulary import ROOT

GROUPS = ("trained art", next(art.name for art in ART_SETS if art.name == "twemoji"))
BATCH = 16


class Labels:
    """Images, annotations and categories of COCO's form."""

    def __init__(self, names: list[str]) -> None:
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.categories = [{"id": kind + 1, "name": name} for kind, name in enumerate(names)]

    def add(self, name: str, scene: Scene) -> None:
        """Add a scene under the name of its file."""
        image = len(self.images) + 1
        self.images.append({"id": image, "file_name": name, "width": CROP, "height": CROP})
        for kind, (x0, y0, x1, y1) in zip(scene.kinds, scene.boxes, strict=True):
            box = [round(float(value) * CROP, 2) for value in (x0, y0, x1 - x0, y1 - y0)]
            self.annotations.append(
                {
                    "id": len(self.annotations) + 1,
                    "image_id": image,
                    "category_id": int(kind) + 1,
                    "bbox": box,
                    "area": round(box[2] * box[3], 2),
                    "iscrowd": 0,
                }
            )

    def document(self) -> dict[str, Any]:
        """Categories that no scene has are left out."""
        seen = {each["category_id"] for each in self.annotations}
        return {
            "images": self.images,
            "annotations": self.annotations,
            "categories": [each for each in self.categories if each["id"] in seen],
        }


def write(folder: Path, pack: Path | None, count: int, seed: int, device: str) -> dict[str, Any]:
    """Write `count` scenes, less those without an object, and return their labels.

    Without a pack they are of coloured shapes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:  # PNGs are compressed outside of Python's lock
        document = _write(folder, pack, count, seed, device, pool)
    (folder / "annotations.json").write_text(json.dumps(document))
    return document


def _write(
    folder: Path, pack: Path | None, count: int, seed: int, device: str, pool: ThreadPoolExecutor
) -> dict[str, Any]:
    book = shape_sprites() if pack is None else load_sprites(pack)
    renderer = Renderer(book, torch.device(device))
    words = lexicon()
    labels = Labels([words.phrases_of[kind][0].singular for kind in range(len(words.kinds))])
    saved = []
    samplers = _samplers(book, seed, shapes=pack is None)
    for place, (group, sampler) in enumerate(samplers.items()):
        torch.manual_seed(seed + place)
        for start in range(0, count // len(samplers), BATCH):
            drawn = min(BATCH, count // len(samplers) - start)
            scenes = [s for s in (sampler.sample() for _ in range(drawn)) if s.kinds]
            for index, (scene, image) in enumerate(
                zip(scenes, pixels(renderer, scenes), strict=True)
            ):
                name = f"{group.replace(' ', '-')}-{start + index:04}.png"
                saved.append(pool.submit(to_image(image).save, folder / name))
                labels.add(name, scene)
    for each in saved:
        each.result()
    return labels.document()


def _samplers(book: SpriteBook, seed: int, *, shapes: bool) -> dict[str, SceneSampler]:
    if shapes:
        return {"shapes": ShapeSampler(book, seed)}
    groups = {name: all_groups()[name] for name in GROUPS}
    return {
        name: SceneSampler(book, sets, seed + 1000 * place, share)
        for place, (name, (sets, share)) in enumerate(groups.items())
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--shapes", action="store_true", help="coloured shapes alone, no pack")
    parser.add_argument("--scenes", type=int, default=320)
    parser.add_argument("--seed", type=int, required=True, help="other sets have other seeds")
    parser.add_argument("--device", default="cpu", help="that draws; each draws its own scenes")
    args = parser.parse_args()
    pack = None if args.shapes else args.pack
    document = write(args.out, pack, args.scenes, args.seed, args.device)
    print(f"{len(document['images'])} scenes, {len(document['annotations'])} objects")


if __name__ == "__main__":
    main()
