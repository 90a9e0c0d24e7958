"""Answers and their events, as text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from legato_client._client import Client
from legato_client._errors import LegatoError
from legato_client._proto import skills
from legato_client._types import results
from legato_client.cli.terminal import Terminal


def show_notice(terminal: Terminal, client: Client) -> None:
    """Print the limits of the server's models on a terminal, if it tells any."""
    if not terminal.is_interactive:
        return
    with contextlib.suppress(LegatoError):  # the answer is there; these words may be missing
        for notice in dict.fromkeys(model.notice for model in client.models()):
            if notice:
                terminal.line(terminal.dim(notice))


@dataclasses.dataclass(slots=True)
class EventPrinter:
    """Printer of one answer's events as they arrive."""

    terminal: Terminal
    _image: results.ImageInfo | None = None
    _inside_line: bool = False
    _reasoning: bool = False
    _words: bool = False

    def show(self, event: results.Event) -> None:
        match event:
            case results.Queued():
                self._line(self.terminal.dim(f"waiting, {event.position} ahead"))
            case results.Started():
                self._image = event.image
            case results.TextDelta() | results.ReasoningDelta():
                self._text(event)
            case results.Detection():
                self._line(f"box     {event.label}  {box_text(event.box, self._image)}")
            case results.PointedObject():
                self._line(f"point   {event.label}  {point_text(event.point, self._image)}")
            case results.OutlineDelta():
                self._outline(event)
            case results.Finished():
                self._finished(event.result)

    def _text(self, event: results.TextDelta | results.ReasoningDelta) -> None:
        reasoning = isinstance(event, results.ReasoningDelta)
        if self._reasoning and not reasoning:
            self._end_line()
        self._reasoning = reasoning
        self._words = self._words or not reasoning
        text = printable(event.text)
        self._write(self.terminal.dim(text) if reasoning else text)

    def _finished(self, result: results.Result) -> None:
        if _is_empty(result):
            self._line("nothing found")
        elif result.text and not self._words:  # words that do not stream
            self._line(printable(result.text))
        self._line(self.terminal.dim(summary(result.info)))

    def _outline(self, event: results.OutlineDelta) -> None:
        if event.box is not None:
            self._line(f"outline {event.index + 1}  {box_text(event.box, self._image)}")
        if event.path_delta:
            self._write(printable(event.path_delta))

    def _write(self, text: str) -> None:
        self.terminal.write(text)
        if text:
            self._inside_line = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._inside_line:
            self._write("\n")

    def _line(self, text: str) -> None:
        self._end_line()
        self.terminal.line(text)


def show_result(terminal: Terminal, result: results.Result) -> None:
    if _is_empty(result):
        terminal.line("nothing found")
    elif result.marks:
        _table(terminal, result.marks, result.info.image)
    else:
        if isinstance(result, results.QueryResult) and result.reasoning is not None:
            terminal.line(terminal.dim(printable(result.reasoning.text)))
        terminal.line(printable(result.text))
    terminal.line(terminal.dim(summary(result.info)))


def printable(text: str) -> str:
    """Remove control characters, which could command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def text_of(result: results.Result) -> str:
    """Return the answer's text; empty for other answers."""
    return printable(result.text)


def _is_empty(result: results.Result) -> bool:
    return bool(skills.of(result).places) and not result.marks


def box_text(box: results.Box, image: results.ImageInfo | None) -> str:
    """Format a place in pixels if the image's size is known, else as fractions."""
    if image is None:
        return f"({box.x_min:.3f}, {box.y_min:.3f}) to ({box.x_max:.3f}, {box.y_max:.3f})"
    left, top, right, bottom = box.to_pixels(image.width, image.height)
    return f"({left}, {top}) to ({right}, {bottom}) px"


def point_text(point: results.Point, image: results.ImageInfo | None) -> str:
    if image is None:
        return f"({point.x:.3f}, {point.y:.3f})"
    x, y = point.to_pixels(image.width, image.height)
    return f"({x}, {y}) px"


def summary(info: results.ResponseInfo) -> str:
    parts = [info.finish_reason, info.model]
    if info.usage is not None:
        parts.append(f"{info.usage.input_tokens} tokens in, {info.usage.output_tokens} out")
    if info.timings is not None:
        parts.append(f"{info.timings.total * 1000:.0f} ms on the server")
    return ", ".join(part for part in parts if part)


def _row(found: results.Mark, image: results.ImageInfo | None) -> tuple[str, str, str]:
    if isinstance(found, results.PointedObject):
        place = point_text(found.point, image)
    else:
        place = box_text(found.box, image)
    confidence = "" if found.confidence is None else f"{found.confidence:.2f}"
    return found.label, place, confidence


def _table(
    terminal: Terminal, marks: Sequence[results.Mark], image: results.ImageInfo | None
) -> None:
    place = "point" if isinstance(marks[0], results.PointedObject) else "box"
    rows = [_row(found, image) for found in marks]
    if any(confidence for _, _, confidence in rows):
        terminal.table(("object", place, "confidence"), rows)
    else:
        terminal.table(("object", place), [row[:2] for row in rows])
    for found in marks:
        if isinstance(found, results.Outline):
            terminal.line(printable(found.path))
