"""Sample what a scene shows, before anything is drawn: kinds, sprites, places, background.

Unit image coordinates 0..1, x right, y down. K objects at most. Boxes are (x0, y0, x1, y1) of the
object's alpha inside the image, whether or not another object covers part of it.
"""

from dataclasses import dataclass

import numpy as np

from legato_training.lexicon import COLOUR_NAMES, COLOURS, Lexicon, lexicon
from legato_training.sprites import LEVELS, SIDE, THUMB, SpriteBook

MAX_OBJECTS = 9
SHAPE_SHARE = 0.12
CROP = 336
GRID = 24
BACKGROUNDS = ("plain", "gradient", "striped", "checkered", "textured", "photo")
PHOTO = BACKGROUNDS.index("photo")
BACKGROUND_ODDS = (0.16, 0.18, 0.07, 0.06, 0.23, 0.30)

Place = tuple[np.ndarray, np.ndarray, float]  # centre, full box, share inside the image
Placed = tuple[int, int, np.ndarray, *Place]  # kind, sprite, matrix


@dataclass
class Scene:
    """One scene, its objects in reading order of the answers: left to right by box centre."""

    kinds: list[int]
    sprites: np.ndarray  # int [n]
    matrices: np.ndarray  # f64 [n, 2, 2] sprite units -> image units
    centres: np.ndarray  # f64 [n, 2]
    boxes: np.ndarray  # f64 [n, 4]
    inside: np.ndarray  # f64 [n] share of the full box inside the image
    covered: np.ndarray  # f64 [n] bound on the share covered by others
    paint_order: np.ndarray  # int [n]
    tints: np.ndarray  # f32 [n, 3]
    colours: list[int]  # named colour per object or -1
    background: int
    background_colours: np.ndarray  # f32 [2, 3]
    background_names: tuple[int, int]  # named colour or -1


class SceneSampler:
    """Draws random scenes from the sprites of some drawing sets."""

    def __init__(
        self,
        book: SpriteBook,
        sets: tuple[int, ...],
        seed: int,
        shape_share: float = SHAPE_SHARE,
        words: Lexicon | None = None,
    ) -> None:
        """``words`` names what is drawn; the one lexicon where none is given."""
        self.book, self.shape_share = book, shape_share
        self.rng = np.random.default_rng(seed)
        self.lexicon = words or lexicon()
        self.by_kind = book.of_kind(sets)
        self.nouns = np.array([i for i in range(self.lexicon.num_nouns) if self.by_kind[i]])
        self.shapes = np.arange(self.lexicon.num_nouns, len(self.lexicon.kinds))

    def sample(self) -> Scene:
        """One scene."""
        return self.place(self.choose_kinds())

    def random_kind(self) -> int:
        """Return a noun, or sometimes a coloured shape."""
        pool = self.shapes if self.rng.random() < self.shape_share else self.nouns
        return int(pool[self.rng.integers(len(pool))])

    def absent_kind(self, present: set[int]) -> int:
        """Return a kind that is not in the image."""
        while True:
            kind = self.random_kind()
            if kind not in present:
                return kind

    def choose_kinds(self) -> list[int]:
        """Choose a counting scene (28%), or up to six objects with some repeats."""
        roll = self.rng.random()
        if roll < 0.28:
            kinds = [self.random_kind()] * int(self.rng.integers(2, MAX_OBJECTS + 1))
            spare = min(MAX_OBJECTS - len(kinds), int(self.rng.integers(0, 3)))
            return kinds + [self.random_kind() for _ in range(spare)]
        if roll < 0.29:
            return []
        count = int(self.rng.choice(6, p=(0.20, 0.22, 0.20, 0.16, 0.12, 0.10))) + 1
        kinds = [self.random_kind()]
        while len(kinds) < count:
            repeat = self.rng.random() < 0.3
            kinds.append(kinds[self.rng.integers(len(kinds))] if repeat else self.random_kind())
        return kinds

    def choose_sprite(self, kind: int) -> int:
        """Choose a drawing set first, so that sets count equally, then one of its drawings."""
        by_set = self.by_kind[kind]
        sprites = by_set[self.rng.integers(len(by_set))]
        return int(sprites[self.rng.integers(len(sprites))])

    def matrix(self, kind: int, scale: float, squeeze: float) -> np.ndarray:
        """Sprite to image units: size, mirror, slight shear and rotation, the image's squeeze."""
        rng = self.rng
        stretch = np.exp(rng.normal(0, 0.08))
        mirror = -1.0 if self.lexicon.kinds[kind].mirror and rng.random() < 0.5 else 1.0
        angle = rng.normal(0, 0.14) if rng.random() < 0.8 else rng.uniform(-0.7, 0.7)
        cos, sin = np.cos(angle), np.sin(angle)
        shear = rng.normal(0, 0.05)
        own = np.array([[mirror * stretch, shear], [0.0, 1 / stretch]]) * scale
        turned = np.array([[cos, -sin], [sin, cos]]) @ own
        return np.array([[1 / np.sqrt(squeeze)], [np.sqrt(squeeze)]]) * turned

    def place(self, kinds: list[int], squeeze: float | None = None) -> Scene:
        """Find places; a kind that finds none is left out. ``squeeze`` is width over height."""
        rng = self.rng
        squeeze = squeeze or float(np.exp(rng.uniform(np.log(9 / 16), np.log(16 / 9))))
        crowded = rng.random() < 0.18
        top = min(0.6, 1.05 / np.sqrt(max(len(kinds), 1)))
        common = rng.uniform(np.log(0.07), np.log(top)) if rng.random() < 0.4 else None
        shared: dict[int, int] = {}
        placed: list[Placed] = []
        for kind in kinds:
            sprite = shared.get(kind, -1)
            if sprite < 0 or rng.random() < 0.3:
                sprite = shared[kind] = self.choose_sprite(kind)
            for attempt in range(10):
                log_scale = (
                    rng.uniform(np.log(0.06), np.log(top))
                    if common is None
                    else common + rng.normal(0, 0.15)
                )
                scale = float(np.clip(np.exp(log_scale) * 0.93**attempt, 0.04, 0.6))
                matrix = self.matrix(kind, scale, squeeze)
                found = self.try_place(
                    sprite, matrix, [p[4] for p in placed], 0.45 if crowded else 0.1
                )
                if found:
                    placed.append((kind, sprite, matrix, *found))
                    break
        return self.finish(placed)

    def try_place(
        self, sprite: int, matrix: np.ndarray, taken: list[np.ndarray], allowed: float
    ) -> Place | None:
        """(centre, full box, inside share) at a random place, or None on too much overlap."""
        centre = self.rng.uniform(0.02, 0.98, 2)
        points = self.book.hull[sprite] @ matrix.T + centre
        full = np.concatenate([points.min(0), points.max(0)])
        area = (full[2] - full[0]) * (full[3] - full[1])
        clipped = np.clip(full, 0.0, 1.0)
        inside = (clipped[2] - clipped[0]) * (clipped[3] - clipped[1]) / area
        if inside < (0.97 if self.rng.random() < 0.75 else 0.6):
            return None
        for other in taken:
            wide = min(full[2], other[2]) - max(full[0], other[0])
            high = min(full[3], other[3]) - max(full[1], other[1])
            if wide > 0 and high > 0:
                smaller = min(area, (other[2] - other[0]) * (other[3] - other[1]))
                if wide * high > allowed * smaller:
                    return None
        return centre, full, inside

    def finish(self, placed: list[Placed]) -> Scene:
        """Order, clip and colour the placed objects; choose the background."""
        count = len(placed)
        full = np.array([p[4] for p in placed]).reshape(count, 4)
        boxes = np.clip(full, 0.0, 1.0)
        order = np.argsort(boxes[:, 0] + boxes[:, 2], kind="stable")
        kinds = [placed[i][0] for i in order]
        sprites = np.array([placed[i][1] for i in order], int)
        tints, colours = self.tints(kinds, sprites)
        background, shades, names = self.choose_background()
        return Scene(
            kinds=kinds,
            sprites=sprites,
            matrices=np.array([placed[i][2] for i in order]).reshape(count, 2, 2),
            centres=np.array([placed[i][3] for i in order]).reshape(count, 2),
            boxes=boxes[order],
            inside=np.array([placed[i][5] for i in order]),
            covered=covered_shares(boxes[order], order),
            paint_order=np.argsort(order),
            tints=tints,
            colours=colours,
            background=background,
            background_colours=shades,
            background_names=names,
        )

    def tints(self, kinds: list[int], sprites: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Multiplied colour per object (white for art) and the colour one may ask for."""
        tints = np.ones((len(kinds), 3), np.float32)
        colours = []
        for i, kind in enumerate(kinds):
            colour = self.lexicon.kinds[kind].colour
            if colour >= 0:
                tints[i] = jitter_colour(self.rng, colour)
            colours.append(colour if colour >= 0 else int(self.book.colour[sprites[i]]))
        return tints, colours

    def choose_background(self) -> tuple[int, np.ndarray, tuple[int, int]]:
        """Kind of background, two colours, and their names where they are named ones."""
        kind = int(self.rng.choice(len(BACKGROUNDS), p=BACKGROUND_ODDS))
        if self.rng.random() < 0.4:
            drawn = self.rng.choice(len(COLOUR_NAMES), 2, replace=False)
            names = (int(drawn[0]), int(drawn[1]))
            return kind, np.stack([jitter_colour(self.rng, n) for n in names]), names
        pastel = self.rng.random() < 0.5
        shades = self.rng.uniform(0.6 if pastel else 0.0, 1.0, (2, 3)).astype(np.float32)
        return kind, shades, (-1, -1)


class ShapeSampler(SceneSampler):
    """Scenes of coloured shapes, which need no pack of drawings, on everything but photographs."""

    def __init__(self, book: SpriteBook, seed: int, words: Lexicon | None = None) -> None:
        super().__init__(book, (), seed, shape_share=1.0, words=words)

    def choose_background(self) -> tuple[int, np.ndarray, tuple[int, int]]:
        """No photograph is at hand."""
        while (chosen := super().choose_background())[0] == PHOTO:
            pass
        return chosen


def jitter_colour(rng: np.random.Generator, colour: int) -> np.ndarray:
    """Return a named colour, slightly off."""
    base = np.array(COLOURS[COLOUR_NAMES[colour]], np.float32)
    return np.clip(base * rng.uniform(0.85, 1.08) + rng.normal(0, 0.02, 3), 0, 1).astype(np.float32)


def covered_shares(boxes_N4: np.ndarray, painted_N: np.ndarray) -> np.ndarray:
    """Upper bound of the share of each box that later painted boxes hide."""
    shares = np.zeros(len(boxes_N4))
    for i, box in enumerate(boxes_N4):
        area = max((box[2] - box[0]) * (box[3] - box[1]), 1e-9)
        for j, other in enumerate(boxes_N4):
            if painted_N[j] > painted_N[i]:
                wide = min(box[2], other[2]) - max(box[0], other[0])
                high = min(box[3], other[3]) - max(box[1], other[1])
                shares[i] += max(wide, 0) * max(high, 0) / area
    return np.minimum(shares, 1.0)


def patch_labels(scene: Scene, book: SpriteBook, background: int) -> np.ndarray:
    """Kind that covers each patch centre [GRID * GRID], ``background`` where none does."""
    labels = np.full((GRID, GRID), background, np.int16)
    ticks = (np.arange(GRID) + 0.5) / GRID
    for i in scene.paint_order:
        x0, y0, x1, y1 = scene.boxes[i]
        columns = slice(int(x0 * GRID), min(GRID, int(np.ceil(x1 * GRID))))
        rows = slice(int(y0 * GRID), min(GRID, int(np.ceil(y1 * GRID))))
        x, y = ticks[columns] - scene.centres[i, 0], ticks[rows] - scene.centres[i, 1]
        inverse = np.linalg.inv(scene.matrices[i])
        u = inverse[0, 0] * x[None, :] + inverse[0, 1] * y[:, None]
        v = inverse[1, 0] * x[None, :] + inverse[1, 1] * y[:, None]
        iu, iv = np.floor((u + 0.5) * THUMB).astype(int), np.floor((v + 0.5) * THUMB).astype(int)
        ok = (iu >= 0) & (iu < THUMB) & (iv >= 0) & (iv < THUMB)
        hit = ok & book.thumb[scene.sprites[i], iv.clip(0, THUMB - 1), iu.clip(0, THUMB - 1)]
        if not hit.any():
            hit[hit.shape[0] // 2, hit.shape[1] // 2] = True
        labels[rows, columns][hit] = scene.kinds[i]
    return labels.reshape(-1)


def render_arrays(scene: Scene) -> dict[str, np.ndarray]:
    """Return the renderer's inputs, padded to MAX_OBJECTS and in painting order."""
    sprite = np.full(MAX_OBJECTS, -1, np.int32)
    level = np.zeros(MAX_OBJECTS, np.int32)
    inverse = np.zeros((MAX_OBJECTS, 2, 3), np.float32)
    tint = np.ones((MAX_OBJECTS, 3), np.float32)
    for slot, i in enumerate(scene.paint_order):
        size = np.sqrt(abs(np.linalg.det(scene.matrices[i]))) * CROP
        back = np.linalg.inv(scene.matrices[i])
        sprite[slot] = scene.sprites[i]
        level[slot] = int(np.clip(np.floor(np.log2(SIDE / size)), 0, LEVELS - 1))
        inverse[slot, :, :2] = back
        inverse[slot, :, 2] = -back @ scene.centres[i]
        tint[slot] = scene.tints[i]
    return {
        "sprite": sprite,
        "level": level,
        "inverse": inverse,
        "tint": tint,
        "background": np.array(scene.background, np.int32),
        "background_colours": scene.background_colours,
    }
