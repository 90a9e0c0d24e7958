"""Charts of records: what is drawn is what was measured."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks.speculation.report import Line, Panel, write_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path, panels, columns=2):
    """The picture's tree."""
    write_svg(tmp_path / "a.svg", panels, columns=columns)
    return ET.parse(tmp_path / "a.svg").getroot()


def test_points_lie_where_the_axes_say(tmp_path):
    """Between the first and the last tick a value has its share of the way."""
    line = Line("a", [(0.0, 0.0), (10.0, 40.0), (20.0, 80.0)])
    root = drawn(tmp_path, [Panel("t", "x", "y", [line])])
    (shape,) = (p.get("d") for p in root.iter(f"{SVG}path") if p.get("fill") == "none")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split())) for p in shape[1:].split("L"))
    assert (x1 - x0, y1 - y0) == pytest.approx(((x2 - x0) / 2, (y2 - y0) / 2), abs=0.1)
    assert x0 < x2
    assert y2 < y0  # up is less in an image
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"t", "x", "y", "0", "20", "80", "a"} <= set(words)


def test_steps_hold_their_value(tmp_path):
    """A line of steps goes along before it goes up."""
    line = Line("a", [(0.0, 1.0), (1.0, 2.0)], steps=True)
    root = drawn(tmp_path, [Panel("t", "x", "y", [line])])
    (shape,) = (p.get("d") for p in root.iter(f"{SVG}path") if p.get("fill") == "none")
    assert shape.index("H") < shape.index("V")


def test_labels_share_a_colour_over_panels(tmp_path):
    """One legend serves all panels; names are text, whatever is in them."""
    lines = [Line("a & <b>", [(0.0, 1.0)]), Line("c", [(0.0, 0.0)])]
    root = drawn(tmp_path, [Panel("one", "x", "y", lines), Panel("two", "x", "y", lines[::-1])])
    first, second, third, fourth = (
        p.get("stroke") for p in root.iter(f"{SVG}path") if p.get("fill") == "none"
    )
    assert (first, second) == (fourth, third)
    assert first != second
    assert [text.text for text in root.iter(f"{SVG}text")].count("a & <b>") == 1


def test_nothing_measured_is_drawn_empty(tmp_path):
    """A panel without points has its axes all the same."""
    root = drawn(tmp_path, [Panel("t", "x", "y", [Line("a", [])])])
    assert [p for p in root.iter(f"{SVG}path") if p.get("fill") == "none"] == []
