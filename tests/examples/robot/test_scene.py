"""Drawings that move, and the truth about them."""

from __future__ import annotations

import numpy as np
import pytest

from examples.robot.scene import NOUNS, Scene, compose
from examples.robot.scoring import overlap

SEEDS = (0, 1, 7)
TIMES = tuple(k * 0.37 for k in range(40))
THREE = ("balloon", "bicycle", "dog")


def test_a_seed_is_a_scene() -> None:
    """The same seed gives the same images and truth, another one another scene."""
    one, same, other = (compose(THREE, seed) for seed in (3, 3, 4))
    assert one == same
    assert one.jpeg(1.5) == same.jpeg(1.5)
    assert one.truth(1.5) != other.truth(1.5)


@pytest.mark.parametrize("noun", NOUNS)
def test_the_truth_is_where_the_pixels_are(noun: str) -> None:
    """What differs from the empty ground is what the truth frames, to two pixels, at any time."""
    scene = compose((noun,), 5)
    empty = np.asarray(Scene(scene.size, ()).image(0))
    for t in TIMES[::7]:
        changed = np.any(np.asarray(scene.image(t)) != empty, axis=2)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        true = scene.truth(t)[noun].to_pixels(*scene.size)
        assert np.abs(np.subtract(seen, true)).max() <= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [(640, 480), (320, 240), (800, 450)])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_things_stay_in_the_image_and_apart(seed: int, size: tuple[int, int], count: int) -> None:
    """No thing leaves the image and none hides another, so that the truth needs no footnote."""
    scene = compose(NOUNS[:count], seed, size)
    for t in TIMES:
        boxes = list(scene.truth(t).values())
        for box in boxes:
            assert 0 <= box.x_min < box.x_max <= 1
            assert 0 <= box.y_min < box.y_max <= 1
        assert all(overlap(a, b) == 0 for a in boxes for b in boxes if a is not b)


@pytest.mark.parametrize("seed", SEEDS)
def test_things_move(seed: int) -> None:
    """A third of a second makes a box worse, so that lateness has a price to measure."""
    scene = compose(THREE, seed)
    for noun in THREE:
        fits = [overlap(scene.truth(t)[noun], scene.truth(t + 0.33)[noun]) for t in TIMES]
        assert sum(fits) / len(fits) < 0.8


@pytest.mark.parametrize(
    ("nouns", "word"), [(("unicorn",), "unicorn"), (("dog", "dog"), "different"), ((), "one to")]
)
def test_a_scene_that_cannot_be_drawn_is_an_error(nouns: tuple[str, ...], word: str) -> None:
    """The error names what is wrong with the nouns."""
    with pytest.raises(ValueError, match=word):
        compose(nouns, 0)
