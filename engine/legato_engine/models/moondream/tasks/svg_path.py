"""An SVG path in the unit square of a box, from the model's text."""

from __future__ import annotations

import re

_VIEWBOX = 960
_INTEGER = re.compile(r"-?[0-9]+")
_ARITY = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_UNSCALED_OF_ARC = (2, 3, 4)  # rotation and the two flags


class SvgPath:
    """Parses a path piece by piece; the results of `push` add up to `text`.

    A piece is a command letter, an integer in a 960 by 960 view of the box, a minus sign for the
    next integer, or blank; any other empties `text` for good. Only complete groups of a command's
    numbers are emitted.
    """

    def __init__(self) -> None:
        self.text = ""
        self._valid = True
        self._command = ""
        self._command_shown = False
        self._numbers: list[int] = []
        self._negative = False

    def push(self, piece: str) -> str:
        """Return the path text that a token completes."""
        piece = piece.strip()
        if not self._valid or not piece:
            return ""
        if piece.upper() in _ARITY:
            return self._begin(piece)
        if piece == "-" and not self._negative:
            self._negative = True
            return ""
        if _INTEGER.fullmatch(piece) and _ARITY.get(self._command.upper()):
            return self._number(int(piece))
        return self._fail()

    def _begin(self, command: str) -> str:
        if self._negative or (not self._command and command.upper() != "M"):
            return self._fail()
        self._command, self._command_shown = command, False
        self._numbers = []
        return self._show([]) if _ARITY[command.upper()] == 0 else ""

    def _number(self, value: int) -> str:
        self._numbers.append(-value if self._negative else value)
        self._negative = False
        command = self._command.upper()
        if len(self._numbers) < _ARITY[command]:
            return ""
        numbers = [
            str(number) if command == "A" and index in _UNSCALED_OF_ARC else _scaled(number)
            for index, number in enumerate(self._numbers)
        ]
        self._numbers = []
        return self._show(numbers)

    def _show(self, numbers: list[str]) -> str:
        words = [] if self._command_shown else [self._command]
        words += [",".join(numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
        self._command_shown = True
        delta = (" " if self.text else "") + " ".join(words)
        self.text += delta
        return delta

    def _fail(self) -> str:
        self._valid = False
        self.text = ""
        return ""


def _scaled(value: int) -> str:
    text = f"{value / _VIEWBOX:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
