"""A small SVG canvas: boxes, arrows, bars and words, and nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK = "#243447"
FAINT = "#6b7a8c"
PAPER = "#ffffff"
BLUE, GREEN, ORANGE, RED, VIOLET, GREY = (
    "#2f6fa8",
    "#3a8f5c",
    "#d98324",
    "#c0453f",
    "#7a5ba6",
    "#9aa7b4",
)
TINTS = {
    BLUE: "#e6f0f8",
    GREEN: "#e6f4ea",
    ORANGE: "#fbefdf",
    RED: "#fae7e6",
    VIOLET: "#efe9f6",
    GREY: "#f1f4f6",
}

Point = tuple[float, float]


class Canvas:
    """Collects shapes; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def text(
        self,
        at: Point,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Write a line of text with its baseline at `at`."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, at: Point, size: Point, lines: Sequence[str] = (), color: str = BLUE, rx: int = 6
    ) -> None:
        """Draw a box with centred lines, the first one bold."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx}" '
            f'fill="{TINTS[color]}" stroke="{color}" stroke-width="1.4"/>'
        )
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
        for index, line in enumerate(lines):
            place = (x + width / 2, top + 17 * index)
            if index:
                self.text(place, line, size=11.5, anchor="middle", color=FAINT)
            else:
                self.text(place, line, anchor="middle", bold=True)

    def frame(self, at: Point, size: Point, title: str, color: str = GREY) -> None:
        """Draw a dashed frame with its title at the top left, inside."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10" '
            f'fill="none" stroke="{color}" stroke-dasharray="5 4"/>'
        )
        self.text((x + 12, y + 20), title, color=FAINT, bold=True)

    def bar(self, at: Point, size: Point, color: str, words: str = "") -> None:
        """Draw a filled bar with a short word in it."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'fill="{color}"/>'
        )
        if words:
            middle = (x + width / 2, y + height / 2 + 4)
            self.text(middle, words, size=11, anchor="middle", color=PAPER)

    def line(self, points: Sequence[Point], color: str = INK, *, dashed: bool = False) -> None:
        """Draw a plain line through the points."""
        self._path(points, color, ' stroke-dasharray="3 4"' if dashed else "")

    def arrow(self, points: Sequence[Point], words: str = "", *, dashed: bool = False) -> None:
        """Draw an arrow through the points, with words above the middle of its first part."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._path(points, INK, f' marker-end="url(#head)"{dash}')
        if words:
            (x0, y0), (x1, y1) = points[:2]
            self.text(((x0 + x1) / 2, (y0 + y1) / 2 - 6), words, size=11.5, anchor="middle")

    def finished(self) -> str:
        """Return the SVG document."""
        return "\n".join([*self._parts, "</svg>", ""])

    def _path(self, points: Sequence[Point], color: str, extra: str) -> None:
        (x, y), *rest = points
        shape = f"M{x:.1f} {y:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in rest)
        self._parts.append(
            f'<path d="{shape}" fill="none" stroke="{color}" stroke-width="1.4"{extra}/>'
        )
