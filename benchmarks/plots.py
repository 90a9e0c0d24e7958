"""Line charts as SVG, panels in a grid: enough for records, and nothing to install."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 24, 34
_LEGEND = 18
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6f4c9b", "#00798c", "#8d5524", "#444444")
_TICKS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of `x`; `steps` holds each value until the next."""

    label: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Lines over the same axes, which begin at 0; lines of one label have one colour."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]


def write_svg(path: Path, panels: Sequence[Panel], *, columns: int) -> None:
    """Write the panels row by row, with one legend below for all of them."""
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="10" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % columns * _WIDTH, index // columns * _HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel, colours), "</g>"]
    parts += _legend(labels, colours, height - _LEGEND / 2)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    points = [point for line in panel.lines for point in line.points] or [(1.0, 1.0)]
    x_end, x_ticks = _axis(max(x for x, _ in points))
    y_end, y_ticks = _axis(max(y for _, y in points))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / x_end * (right - _LEFT), bottom - y / y_end * (bottom - _TOP)

    parts = [_text(_WIDTH / 2, 14, panel.title, "middle", bold=True)]
    for tick in x_ticks:
        at, _ = place(tick, 0)
        parts += [_rule(at, _TOP, at, bottom), _text(at, bottom + 12, f"{tick:g}", "middle")]
    for tick in y_ticks:
        _, at = place(0, tick)
        parts += [_rule(_LEFT, at, right, at), _text(_LEFT - 4, at + 3, f"{tick:g}", "end")]
    parts.append(_text((_LEFT + right) / 2, bottom + 26, panel.x_name, "middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 12 {middle:.0f})"'
    parts.append(_text(12, middle, panel.y_name, "middle", turned))
    for line in panel.lines:
        shape = _path([place(*point) for point in line.points], steps=line.steps)
        if shape:
            parts.append(
                f'<path d="{shape}" fill="none" stroke="{colours[line.label]}" stroke-width="1.3"/>'
            )
    return parts


def _axis(most: float) -> tuple[float, list[float]]:
    """Where an axis from 0 ends, and its ticks: round numbers, the last at or above `most`."""
    if not most > 0:
        return 1.0, [0.0, 1.0]
    rough = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    count = math.ceil(most / step - 1e-9)
    return step * count, [step * i for i in range(count + 1)]


def _path(points: Sequence[tuple[float, float]], *, steps: bool) -> str:
    if not points:
        return ""
    (x, y), *rest = points
    moves = [f"M{x:.1f} {y:.1f}"]
    for x, y in rest:
        moves.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return "".join(moves)


def _legend(labels: Sequence[str], colours: dict[str, str], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for label in labels:
        parts.append(
            f'<path d="M{x:.0f} {y:.0f}h14" stroke="{colours[label]}" stroke-width="2.5"/>'
        )
        parts.append(_text(x + 18, y + 3, label, "start"))
        x += 30 + 6 * len(label)
    return parts


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#ddd" stroke-width="0.6"/>'


def _text(
    x: float, y: float, words: str, anchor: str, extra: str = "", *, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight} {extra}>'
        f"{escape(words)}</text>"
    )
