"""One scene's prompts and answers as token slots of fixed lengths, packed after one image.

S suffix length; every slot starts at position 577 and sees the image and, causally, itself.
``tokens`` are the inputs, ``targets`` the next token where it is learned (-1 elsewhere), values
travel with coord and size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from legato_training.config import ANSWER, COORD, EOS, OPEN, SEPARATOR, SIZE
from legato_training.language import Narrator
from legato_training.lexicon import Phrase, lexicon
from legato_training.scenes import Scene, SceneSampler, patch_labels, render_arrays
from legato_training.sprites import SpriteBook, resample_closed
from legato_training.vocabulary import PATH_BOX, PATH_STEP, TOKENIZER, Words

SLOTS = (40, 40, 22, 30, 58, 83, 34, 28)
DETECT_A, DETECT_B, OTHER, POINT, SEGMENT, CAPTION, QUERY_A, QUERY_B = range(8)
LENGTH = sum(SLOTS)
STARTS = tuple(int(s) for s in np.cumsum((0, *SLOTS[:-1])))
MAX_COORDS = 64
MAX_SIZES = 28
PATH_POINTS = 20


@dataclass
class Turn:
    """A prompt and its answer; values hold (x, 0) for coord and (w, h) for size."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)

    def say(self, ids: list[int]) -> "Turn":
        """Append plain tokens to the answer."""
        self.tokens += ids
        self.values += [(0.0, 0.0)] * len(ids)
        return self

    def point(self, box: np.ndarray) -> "Turn":
        """Append the centre of a box."""
        self.tokens += [COORD, COORD]
        self.values += [((box[0] + box[2]) / 2, 0.0), ((box[1] + box[3]) / 2, 0.0)]
        return self

    def box(self, box: np.ndarray) -> "Turn":
        """Append centre and size of a box."""
        self.point(box)
        self.tokens.append(SIZE)
        self.values.append((box[2] - box[0], box[3] - box[1]))
        return self

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass
class Packed:
    """The slots of one scene."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(LENGTH, np.int16))
    values: np.ndarray = field(default_factory=lambda: np.zeros((LENGTH, 2), np.float32))
    targets: np.ndarray = field(default_factory=lambda: np.full(LENGTH, -1, np.int16))
    target_values: np.ndarray = field(default_factory=lambda: np.zeros((LENGTH, 2), np.float32))

    def put(self, slot: int, turn: Turn) -> None:
        """Write a turn into its slot; the answer's last token (EOS) is a target only."""
        assert len(turn) <= SLOTS[slot] + 1, (slot, len(turn))
        start, prompt = STARTS[slot], len(turn.prompt)
        inputs = turn.prompt + turn.tokens[:-1]
        self.tokens[start : start + len(inputs)] = inputs
        answer = start + prompt
        self.values[answer : answer + len(turn.values) - 1] = np.reshape(turn.values[:-1], (-1, 2))
        targets = slice(answer - 1, answer - 1 + len(turn.tokens))
        self.targets[targets] = turn.tokens
        self.target_values[targets] = turn.values


class SlotBuilder:
    """Turns scenes into packed slots."""

    def __init__(self, sampler: SceneSampler, words: Words, rng: np.random.Generator) -> None:
        self.sampler = sampler
        self.words = words
        self.rng = rng
        self.book = sampler.book

    def prompt(self, skill: str, text: str) -> list[int]:
        """Template prefix, text, answer opener."""
        return [OPEN, self.words.word[skill], SEPARATOR, *self.words.cached(text), ANSWER]

    def build(self, scene: Scene) -> Packed:
        """All slots of a scene; a slot without a fitting turn stays empty."""
        packed = Packed()
        narrator = Narrator(scene, self.rng, self.sampler.lexicon)
        present = set(scene.kinds)
        absent = self.sampler.absent_kind(present)
        first, second = self.two_phrases(narrator, absent)
        packed.put(DETECT_A, self.detect(narrator, first))
        packed.put(DETECT_B, self.detect(narrator, second))
        packed.put(OTHER, self.other(narrator, self.sampler.absent_kind(present)))
        asked = (
            narrator.name(absent)
            if not present or self.rng.random() < 0.2
            else self.present_phrase(narrator)
        )
        packed.put(POINT, self.point(narrator, asked))
        segment = self.segment(narrator)
        if segment:
            packed.put(SEGMENT, segment)
        packed.put(CAPTION, self.caption(narrator))
        for slot in (QUERY_A, QUERY_B):
            turn = self.query(narrator, absent, SLOTS[slot])
            if turn:
                packed.put(slot, turn)
        return packed

    def present_phrase(self, narrator: Narrator, avoid: Phrase | None = None) -> Phrase:
        """Return a name of something that is there, sometimes of its group."""
        kinds = [k for k in narrator.members if not avoid or k not in avoid.kinds] or list(
            narrator.members
        )
        kind = kinds[self.rng.integers(len(kinds))]
        groups = narrator.lexicon.groups_of[kind]
        if groups and self.rng.random() < 0.15:
            return groups[self.rng.integers(len(groups))]
        return narrator.name(kind)

    def two_phrases(self, narrator: Narrator, absent: int) -> tuple[Phrase, Phrase]:
        """Two different things to detect; where there is only one, the second is absent."""
        if not narrator.members:
            return narrator.name(absent), narrator.name(absent)
        first = self.present_phrase(narrator)
        if len(narrator.members) == 1:
            return first, narrator.name(absent)
        return first, self.present_phrase(narrator, first)

    def asked_text(self, phrase: Phrase) -> str:
        """Singular, plural or capitalised."""
        roll = self.rng.random()
        if roll < 0.2:
            return phrase.plural
        return phrase.singular.capitalize() if roll < 0.26 else phrase.singular

    def detect(self, narrator: Narrator, phrase: Phrase) -> Turn:
        """Every box the phrase covers, left to right."""
        turn = Turn(self.prompt("detect", " " + self.asked_text(phrase)))
        for i in narrator.matching(phrase):
            turn.box(narrator.scene.boxes[i])
        return turn.say([EOS])

    def other(self, narrator: Narrator, absent: int) -> Turn:
        """Mostly something absent: a random kind, or a shape that is there in another colour."""
        if narrator.members and self.rng.random() < 0.3:
            phrase = self.present_phrase(narrator)
            if len(narrator.matching(phrase)) <= 3:
                return self.detect(narrator, phrase)
        return self.detect(narrator, narrator.name(self.hard_absent(narrator) or absent))

    def hard_absent(self, narrator: Narrator) -> int | None:
        """Return a shape of the image in a colour it does not have there."""
        shapes = [k for k in narrator.members if narrator.lexicon.kinds[k].shape >= 0]
        if not shapes or self.rng.random() < 0.4:
            return None
        shape = narrator.lexicon.kinds[shapes[0]].shape
        others = [
            int(k)
            for k in self.sampler.shapes
            if narrator.lexicon.kinds[k].shape == shape and k not in narrator.members
        ]
        return others[self.rng.integers(len(others))] if others else None

    def point(self, narrator: Narrator, phrase: Phrase) -> Turn:
        """Centres of everything the phrase covers, left to right."""
        turn = Turn(self.prompt("point", " " + self.asked_text(phrase)))
        for i in narrator.matching(phrase):
            turn.point(narrator.scene.boxes[i])
        return turn.say([EOS])

    def segment(self, narrator: Narrator) -> Turn | None:
        """Box and outline of a well visible object: the only one of its kind, else the largest."""
        scene = narrator.scene
        whole = [
            i
            for i in range(len(scene.kinds))
            if scene.inside[i] > 0.93
            and scene.covered[i] < 0.12
            and self.book.share[scene.sprites[i]] > 0.8
        ]
        fits = [i for i in whole if self.is_largest(scene, i)]
        if not fits:
            return None
        i = fits[self.rng.integers(len(fits))]
        phrase = narrator.name(scene.kinds[i])
        name = self.asked_text(phrase) if self.rng.random() < 0.1 else phrase.singular
        turn = Turn(self.prompt("segment", name)).box(scene.boxes[i])
        return turn.say(self.path(scene, i)).say([EOS])

    @staticmethod
    def is_largest(scene: Scene, i: int) -> bool:
        """Whether ``i`` is the largest of its kind."""
        sizes = [
            abs(np.linalg.det(scene.matrices[j]))
            for j in range(len(scene.kinds))
            if scene.kinds[j] == scene.kinds[i]
        ]
        largest: bool = abs(np.linalg.det(scene.matrices[i])) >= max(sizes)
        return largest

    def path(self, scene: Scene, i: int) -> list[int]:
        """``M x y L x y ... z`` in a 960 box, clockwise from the topmost point."""
        numbers = path_numbers(outline_in_box(self.book.outline[scene.sprites[i]], scene, i))
        ids = [self.words.number[int(n)] for n in numbers.reshape(-1)]
        return [self.words.move, *ids[:2], self.words.line, *ids[2:], self.words.close]

    def caption(self, narrator: Narrator) -> Turn:
        """One of the three lengths; a text too long for its slot gives way to a shorter one."""
        sizes = ("short", "normal", "long")
        for size in sizes[self.rng.integers(3) :: -1]:
            prompt = [OPEN, self.words.word["describe"], SEPARATOR, self.words.word[size], ANSWER]
            turn = Turn(prompt).say(self.words.encode(getattr(narrator, size)())).say([EOS])
            if len(turn) <= SLOTS[CAPTION]:
                return turn
        raise AssertionError("a short caption always fits")

    def query(self, narrator: Narrator, absent: int, room: int) -> Turn | None:
        """Return a question that fits, or None."""
        for _ in range(4):
            question, answer = narrator.question(absent)
            turn = Turn(self.prompt("query", question)).say(self.words.encode(answer)).say([EOS])
            if len(turn) <= room:
                return turn
        return None


def outline_in_box(outline_P2: np.ndarray, scene: Scene, i: int) -> np.ndarray:
    """Move the sprite's outline into the scene, then its box, [PATH_POINTS, 2] in 0..1."""
    moved = outline_P2 @ scene.matrices[i].T + scene.centres[i]
    box = scene.boxes[i]
    inside = np.clip((moved - box[:2]) / (box[2:] - box[:2]), 0.0, 1.0)
    if np.linalg.det(scene.matrices[i]) < 0:
        inside = inside[::-1]
    top = int(np.argmin(inside[:, 1] + 1e-3 * inside[:, 0]))
    return resample_closed(np.roll(inside, -top, axis=0), PATH_POINTS)


def path_numbers(points_P2: np.ndarray) -> np.ndarray:
    """0..1 -> multiples of PATH_STEP in 0..PATH_BOX."""
    return (np.rint(points_P2 * PATH_BOX / PATH_STEP) * PATH_STEP).astype(int)


def region_targets(packed: Packed) -> dict[str, np.ndarray]:
    """Where coordinates and sizes are learned (index or -1) and their true values, padded."""
    coords = np.flatnonzero(packed.targets == COORD)[:MAX_COORDS]
    sizes = np.flatnonzero(packed.targets == SIZE)[:MAX_SIZES]
    coord_at, size_at = np.full(MAX_COORDS, -1, np.int16), np.full(MAX_SIZES, -1, np.int16)
    coord_value, size_value = np.zeros(MAX_COORDS, np.float32), np.ones((MAX_SIZES, 2), np.float32)
    coord_at[: len(coords)], size_at[: len(sizes)] = coords, sizes
    coord_value[: len(coords)] = packed.target_values[coords, 0]
    size_value[: len(sizes)] = packed.target_values[sizes]
    return {
        "coord_at": coord_at,
        "coord_value": coord_value,
        "size_at": size_at,
        "size_value": size_value,
    }


# ---------------------------------------------------------------- batches
# Endless batches of scenes and their slots, made in worker processes. The images are drawn on the
# GPU.

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
