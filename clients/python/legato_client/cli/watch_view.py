"""What `legato watch` shows while it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from legato_client import Detection, LegatoError, PointedObject, Result
from legato_client._convert import skills
from legato_client._values.results import Mark
from legato_client.cli.terminal import Terminal, printable
from legato_client.live.figures import Figures, Totals
from legato_client.live.lane import Answered
from legato_client.live.outputs import marks

if TYPE_CHECKING:
    from rich.live import Live

_LINE_PERIOD = 10.0  # seconds
_MOST_ROWS = 12
_HEADS = ("task", "found", "where", "confidence", "track")
_FRAME_ROWS = 5  # of the table and the lines about the connection


class View:
    """A table and, in a large terminal, the picture; elsewhere a line every ten seconds.

    `take` is for any thread, the rest for the one that made it.
    """

    def __init__(self, terminal: Terminal, figures: Figures, source: str) -> None:
        self._terminal = terminal
        self._figures = figures
        self._source = source
        self._latest: Answered | None = None
        self._said = time.monotonic()
        self._live: Live | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> View:
        if self._terminal.interactive and importlib.util.find_spec("rich"):
            from rich.live import Live

            console = self._terminal.console()
            live = Live(console=console, auto_refresh=False, transient=True)
            self._live = self._stack.enter_context(live)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def take(self, answered: Answered) -> None:
        """It is shown at the next `refresh`."""
        self._latest = answered

    def close(self) -> None:
        """Nothing is left to do."""

    def refresh(self) -> None:
        """Show how things are."""
        if self._live is not None:
            self._live.update(self._picture_and_table(self._live.console.size), refresh=True)
        elif time.monotonic() - self._said >= _LINE_PERIOD:
            self._said = time.monotonic()
            self._terminal.line(state_line(self._figures))

    def _picture_and_table(self, size: tuple[int, int]) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from legato_client.cli.half_blocks import HalfBlocks, fits

        columns, lines = size
        latest = self._latest
        rows = rows_of(latest) if latest else []
        table = Table(*_HEADS, header_style="bold", border_style="dim")
        for row in rows[:_MOST_ROWS]:
            table.add_row(*(Text(printable(cell)) for cell in row))  # a label is no markup
        parts: list[Any] = []
        left = lines - min(len(rows), _MOST_ROWS) - _FRAME_ROWS - 3
        if latest is not None and fits(columns, left):
            with contextlib.suppress(OSError, ValueError):  # the answer counts, not the picture
                parts.append(HalfBlocks(latest.shot.picture(), marks(latest), columns, left))
        parts.append(table)
        if len(rows) > _MOST_ROWS:
            parts.append(Text(f"and {len(rows) - _MOST_ROWS} more"))
        parts.append(Text(f"{self._source}: {state_line(self._figures)}"))
        return Group(*parts)


def state_line(figures: Figures) -> str:
    """How it goes, in one line."""
    totals = figures.totals()
    age = "-" if figures.last_age is None else f"{figures.last_age * 1e3:.0f} ms"
    return (
        f"source {figures.source}, server {figures.server} · "
        f"{figures.rate('taken'):.1f} frames/s, {figures.rate('answered'):.1f} answers/s · "
        f"age {age} · {_left_out(totals)} left out, {totals.lost} lost"
    )


def _left_out(totals: Totals) -> int:
    return totals.replaced + totals.refused + totals.unreadable + sum(totals.dropped.values())


def rows_of(answered: Answered) -> list[tuple[str, ...]]:
    """A row for each thing found, answer and failed task."""
    size = (answered.image.width, answered.image.height) if answered.image else (1, 1)
    return [
        (name, *cells)
        for name, outcome in answered.outcomes.items()
        for cells in _cells(outcome, size)
    ]


def _cells(outcome: Result | LegatoError, size: tuple[int, int]) -> list[tuple[str, ...]]:
    match outcome:
        case LegatoError():
            return [(f"failed: {outcome}", "", "", "")]
        case _ if skills.of(outcome).places:
            return [
                (mark.label, _place(mark, size), _number(mark.confidence), _track(mark))
                for mark in outcome.marks
            ]
        case _:
            return [(outcome.text, "", "", "")]


def _place(mark: Mark, size: tuple[int, int]) -> str:
    if isinstance(mark, PointedObject):
        return "{}, {}".format(*mark.to_pixels(*size))
    return _box(mark.box.to_pixels(*size))


def _track(mark: Mark) -> str:
    return mark.track_id if isinstance(mark, Detection) else ""


def _box(pixels: tuple[int, int, int, int]) -> str:
    left, top, right, bottom = pixels
    return f"{left}, {top} to {right}, {bottom}"


def _number(confidence: float | None) -> str:
    return "" if confidence is None else f"{confidence:.2f}"
