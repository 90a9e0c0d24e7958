"""Counts of right and wrong answers, and the metrics made of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from legato_training.language import NUMBERS
from legato_training.lexicon import Phrase, lexicon
from legato_training.scenes import Scene
from legato_training.sprites import SIDE, SpriteBook
from legato_training.vocabulary import PATH_BOX

SIZES = (("small", 0.0, 0.08), ("middle", 0.08, 0.16), ("large", 0.16, 9.0))
CANVAS = 192

Box = Sequence[float] | np.ndarray  # x0, y0, x1, y1


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if wide <= 0 or high <= 0:
        return 0.0
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - wide * high
    share: float = wide * high / union
    return share


def match(found: Sequence[Box], truth: Sequence[Box], threshold: float) -> list[tuple[int, int]]:
    """Greedy one-to-one matching by overlap, best first: (found, truth) pairs."""
    scored = sorted(
        ((overlap(f, t), i, j) for i, f in enumerate(found) for j, t in enumerate(truth)),
        reverse=True,
    )
    pairs, used_f, used_t = [], set(), set()
    for score, i, j in scored:
        if score >= threshold and i not in used_f and j not in used_t:
            pairs.append((i, j))
            used_f.add(i)
            used_t.add(j)
    return pairs


def f1(hits: float, found: float, truth: float) -> float:
    """2 hits / (found + truth)."""
    return 2 * hits / (found + truth) if found + truth else 0.0


class Tally:
    """Accumulates one group of scenes."""

    def __init__(self, book: SpriteBook) -> None:
        self.book = book
        self.lexicon = lexicon()
        self.sums: dict[str, float] = defaultdict(float)
        self.per_kind: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        names = [
            (name, kind)
            for kind, entry in enumerate(self.lexicon.kinds)
            for name in (*entry.names, *entry.plurals)
        ]
        self.names = sorted(names, key=lambda pair: -len(pair[0]))

    def truth(self, scene: Scene, phrase: Phrase) -> list[int]:
        """Objects a phrase covers."""
        return [i for i, kind in enumerate(scene.kinds) if kind in phrase.kinds]

    def detect(self, scene: Scene, phrase: Phrase, boxes: Sequence[Box]) -> None:
        """Boxes at IoU 0.5; recall by size of the true box, precision by size of the found one."""
        truth = [scene.boxes[i] for i in self.truth(scene, phrase)]
        pairs = match(boxes, truth, 0.5)
        kind = self.per_kind[min(phrase.kinds)]
        for place, amount in enumerate((len(pairs), len(boxes), len(truth))):
            kind[place] += amount
        for name, amount in (("hits", len(pairs)), ("found", len(boxes)), ("truth", len(truth))):
            self.sums[name] += amount
        for label, low, high in SIZES:

            def inside(box: Box) -> bool:
                side: float = max(box[2] - box[0], box[3] - box[1])
                return low <= side < high  # noqa: B023 - used at once

            self.sums[f"hits_{label}"] += sum(inside(truth[j]) for _, j in pairs)
            self.sums[f"truth_{label}"] += sum(map(inside, truth))
            matched = dict(pairs)
            self.sums[f"found_{label}"] += sum(
                inside(truth[matched[i]]) if i in matched else inside(box)
                for i, box in enumerate(boxes)
            )

    def invented(self, any_box: bool) -> None:
        """Whether something absent got a box."""
        self.sums["absent"] += 1
        self.sums["invented"] += any_box

    def point(self, scene: Scene, phrase: Phrase, points: Sequence[tuple[float, float]]) -> None:
        """Count a point as a hit in a true box that no other point has taken."""
        free = self.truth(scene, phrase)
        self.sums["point_truth"] += len(free)
        self.sums["point_found"] += len(points)
        for x, y in points:
            hit = next(
                (
                    i
                    for i in free
                    if scene.boxes[i][0] <= x <= scene.boxes[i][2]
                    and scene.boxes[i][1] <= y <= scene.boxes[i][3]
                ),
                None,
            )
            if hit is not None:
                free.remove(hit)
                self.sums["point_hits"] += 1

    def segment(
        self, scene: Scene, phrase: Phrase, boxes: Sequence[Box], numbers: list[int]
    ) -> None:
        """IoU of the answered polygon with the object's alpha, for single and uncovered objects."""
        wanted = self.truth(scene, phrase)
        if len(wanted) != 1 or scene.covered[wanted[0]] > 0.01 or scene.inside[wanted[0]] < 0.97:
            return
        self.sums["segments"] += 1
        if not boxes or len(numbers) < 6:
            return
        x0, y0, x1, y1 = boxes[0]
        points = np.array(numbers[: len(numbers) // 2 * 2], float).reshape(-1, 2) / PATH_BOX
        polygon = [
            ((x0 + px * (x1 - x0)) * CANVAS, (y0 + py * (y1 - y0)) * CANVAS) for px, py in points
        ]
        canvas = Image.new("1", (CANVAS, CANVAS))
        ImageDraw.Draw(canvas).polygon(polygon, fill=1)
        drawn, real = np.asarray(canvas), self.mask(scene, wanted[0])
        self.sums["segment_iou"] += (drawn & real).sum() / max((drawn | real).sum(), 1)

    def mask(self, scene: Scene, i: int) -> np.ndarray:
        """Return the object's alpha on the canvas, bool [CANVAS, CANVAS]."""
        ticks = (np.arange(CANVAS) + 0.5) / CANVAS
        x, y = ticks[None, :] - scene.centres[i, 0], ticks[:, None] - scene.centres[i, 1]
        inverse = np.linalg.inv(scene.matrices[i])
        column = np.floor((inverse[0, 0] * x + inverse[0, 1] * y + 0.5) * SIDE).astype(int)
        row = np.floor((inverse[1, 0] * x + inverse[1, 1] * y + 0.5) * SIDE).astype(int)
        inside = (column >= 0) & (column < SIDE) & (row >= 0) & (row < SIDE)
        alpha = self.book.rgba[scene.sprites[i], ..., 3]
        covered: np.ndarray = inside & (
            alpha[row.clip(0, SIDE - 1), column.clip(0, SIDE - 1)] > 127
        )
        return covered

    def count(self, scene: Scene, phrase: Phrase, answer: str) -> None:
        """Score counting, up to five and in all."""
        number = len(self.truth(scene, phrase))
        right = answer.strip().rstrip(".").lower() == NUMBERS[number]
        self.sums["counts"] += 1
        self.sums["counts_right"] += right
        if number <= 5:
            self.sums["counts_5"] += 1
            self.sums["counts_5_right"] += right

    def caption(self, scene: Scene, text: str) -> None:
        """Kinds named in the caption against kinds in the scene."""
        named = self.named_kinds(text.lower())
        present = set(scene.kinds)
        self.sums["caption_hits"] += len(named & present)
        self.sums["caption_found"] += len(named)
        self.sums["caption_truth"] += len(present)

    def named_kinds(self, text: str) -> set[int]:
        """Kinds whose names a text holds, longest names first."""
        text = f" {text.replace(',', ' ').replace('.', ' ')} "
        found = set()
        for name, kind in self.names:
            padded = f" {name.lower()} "
            if padded in text:
                found.add(kind)
                text = text.replace(padded, " . ")
        return found

    def metrics(self) -> dict[str, Any]:
        """All metrics, each 0..1."""
        s = self.sums
        sized = {
            f"detect_f1_{label}": f1(s[f"hits_{label}"], s[f"found_{label}"], s[f"truth_{label}"])
            for label, _, _ in SIZES
        }
        per_noun = {
            self.lexicon.kinds[kind].names[0]: [round(f1(*v), 3), int(v[2])]
            for kind, v in sorted(self.per_kind.items())
        }
        return {
            "detect_f1": f1(s["hits"], s["found"], s["truth"]),
            "detect_precision": s["hits"] / max(s["found"], 1),
            "detect_recall": s["hits"] / max(s["truth"], 1),
            **sized,
            "point_hit": f1(s["point_hits"], s["point_found"], s["point_truth"]),
            "invented": s["invented"] / max(s["absent"], 1),
            "count_to_5": s["counts_5_right"] / max(s["counts_5"], 1),
            "count": s["counts_right"] / max(s["counts"], 1),
            "segment_iou": s["segment_iou"] / max(s["segments"], 1),
            "caption_noun_f1": f1(s["caption_hits"], s["caption_found"], s["caption_truth"]),
            "per_noun": per_noun,
        }
