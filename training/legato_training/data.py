"""Endless batches of scenes and their slots, made in worker processes.

The images are drawn on the GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from legato_training.lexicon import lexicon
from legato_training.scenes import SceneSampler, patch_labels, render_arrays
from legato_training.slots import SlotBuilder, region_targets
from legato_training.sprites import SpriteBook
from legato_training.vocabulary import TOKENIZER, Words

Arrays = dict[str, np.ndarray]


def scene_arrays(builder: SlotBuilder) -> Arrays:
    """One random scene as arrays."""
    scene = builder.sampler.sample()
    packed = builder.build(scene)
    return {
        "tokens": packed.tokens,
        "values": packed.values,
        "targets": packed.targets,
        "patches": patch_labels(scene, builder.book, len(lexicon().kinds)),
        **region_targets(packed),
        **render_arrays(scene),
    }


class SceneStream(IterableDataset[Arrays]):
    """Yields whole batches; each worker of each rank has its own seed."""

    def __init__(
        self,
        book: SpriteBook,
        sets: tuple[int, ...],
        batch: int,
        seed: int,
        tokenizer: Path = TOKENIZER,
    ):
        self.book, self.sets, self.batch, self.seed, self.tokenizer = (
            book,
            sets,
            batch,
            seed,
            tokenizer,
        )

    def __iter__(self) -> Iterator[Arrays]:
        info = get_worker_info()
        seed = self.seed * 1009 + (info.id if info else 0)
        sampler = SceneSampler(self.book, self.sets, seed)
        builder = SlotBuilder(
            sampler, Words(self.tokenizer), np.random.default_rng(seed + 500_000_000)
        )
        while True:
            scenes = [scene_arrays(builder) for _ in range(self.batch)]
            yield {key: np.stack([s[key] for s in scenes]) for key in scenes[0]}


def unchanged(batch: Arrays) -> Arrays:
    """Keep batches numpy, so that they travel through pipes and need no shared memory."""
    return batch


def scene_loader(
    book: SpriteBook, sets: tuple[int, ...], batch: int, seed: int, workers: int
) -> DataLoader[Arrays]:
    """Load ready batches; workers are forked, so build it before CUDA is touched."""
    stream = SceneStream(book, sets, batch, seed)
    extra: dict[str, Any] = {}
    if workers:
        extra = {"prefetch_factor": 3, "multiprocessing_context": "fork"}
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        collate_fn=unchanged,  # type: ignore[arg-type]  # torch's type is of lists of items
        **extra,
    )
