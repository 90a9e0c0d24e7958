"""The model's path tokens as an SVG path."""

from __future__ import annotations

import pytest
from legato_engine.models.moondream.tasks import SvgPath


def read(pieces):
    """The path after all pieces, and the texts it returned."""
    path = SvgPath()
    return path, "".join(map(path.push, pieces))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ("M 0 960 L 480 240 z", "M 0,1 L 0.5,0.25 z"),
        ("M 96 96 192 192 Z", "M 0.1,0.1 0.2,0.2 Z"),
        ("m 1 2 l - 480 - 0 z", "m 0.001,0.002 l -0.5,0 z"),
        ("M 0 0 C 96 96 192 192 288 288", "M 0,0 C 0.1,0.1 0.2,0.2 0.3,0.3"),
        ("M 0 0 H 480 V 96", "M 0,0 H 0.5 V 0.1"),
        ("M 0 0 A 96 96 30 0 1 480 480", "M 0,0 A 0.1,0.1 30,0 1,0.5 0.5"),
        ("M 320 1", "M 0.333,0.001"),
        ("", ""),
    ],
)
def test_numbers_become_the_unit_square(pieces, text):
    """Numbers are 960ths of the box with three decimals at most, in pairs."""
    path, shown = read(pieces.split())
    assert path.text == shown == text


@pytest.mark.parametrize("pieces", ["M 0 0 L 5", "M 0 0 L", "M 0 0 C 1 2 3 4 5"])
def test_unfinished_groups_are_left_out(pieces):
    """A path that is cut off ends after its last complete stroke."""
    path, shown = read(pieces.split())
    assert path.text == shown == "M 0,0"


@pytest.mark.parametrize(
    "pieces",
    [
        "5 M 0 0",
        "M 0 0 x",
        "M 0 0 1.5 2",
        "M 0 0 - L 1 1",
        "M 0 0 - - 1 1",
        "L 0 0",
        "M 0 0 z 1",
        "M ١ ٢",
    ],
)
def test_what_is_no_path_gives_an_empty_one(pieces):
    """An invalid piece empties the path, and raises nothing."""
    path, _ = read(pieces.split())
    assert path.text == ""
    assert path.push("M") == path.push("1") == path.push("2") == ""


def test_blank_tokens_mean_nothing():
    """Whitespace around and between pieces is ignored."""
    path, _ = read([" M", " ", "0", "\n", " 480 "])
    assert path.text == "M 0,0.5"
