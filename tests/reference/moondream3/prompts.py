"""The prompt after the image: ids, and values of hints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.reference.moondream3.config import Length, TokenIds


@dataclass(frozen=True)
class Text:
    """A token of the vocabulary."""

    id: int


@dataclass(frozen=True)
class Coord:
    """A coordinate as a token."""

    value: float


@dataclass(frozen=True)
class Size:
    """A width and a height as a token."""

    width: float
    height: float


Token = Text | Coord | Size
Ref = Sequence[float]
"""A hint: a point (x, y) or a box (x0, y0, x1, y1)."""


def object_text(skill: str, text: str) -> str:
    """The text of an object's name: stripped, after a space for detect and point."""
    return (" " if skill in ("detect", "point") else "") + text.strip()


def texts(ids: Sequence[int]) -> list[Token]:
    """Ids as tokens."""
    return [Text(token_id) for token_id in ids]


def hints(refs: Sequence[Ref]) -> list[Token]:
    """A point is two coordinates, a box those of its centre and a size; no value is rounded.

    Raises:
        ValueError: not 2 or 4 finite values of 0..1, or a box whose end is before its start.
    """
    tokens: list[Token] = []
    for ref in refs:
        if len(ref) not in (2, 4) or not all(math.isfinite(v) and 0 <= v <= 1 for v in ref):
            raise ValueError(f"{ref} is not 2 or 4 values of 0..1")
        if len(ref) == 2:
            tokens += [Coord(ref[0]), Coord(ref[1])]
            continue
        x0, y0, x1, y1 = ref
        if x0 > x1 or y0 > y1:
            raise ValueError(f"{ref} ends before it starts")
        tokens += [Coord((x0 + x1) / 2), Coord((y0 + y1) / 2), Size(x1 - x0, y1 - y0)]
    return tokens


def _template(
    ids: TokenIds, words: Sequence[int], rest: list[Token], opener: int | None = None
) -> list[Token]:
    end = ids.answer if opener is None else opener
    return [Text(ids.open), *texts(words), Text(ids.separator), *rest, Text(end)]


def caption_prompt(ids: TokenIds, length: Length) -> list[Token]:
    """Describe, and how long."""
    words = {"short": ids.short, "normal": ids.normal, "long": ids.long}[length]
    return _template(ids, ids.describe, texts(words))


def query_prompt(
    ids: TokenIds, question: Sequence[int], refs: Sequence[Ref] = (), reasoning: bool = False
) -> list[Token]:
    """A question, to be answered at once or after thinking."""
    opener = ids.thinking if reasoning else ids.answer
    return _template(ids, ids.query, [*hints(refs), *texts(question)], opener)


def detect_prompt(ids: TokenIds, name: Sequence[int]) -> list[Token]:
    """The boxes of all objects of a name."""
    return _template(ids, ids.detect, texts(name))


def point_prompt(ids: TokenIds, name: Sequence[int], refs: Sequence[Ref] = ()) -> list[Token]:
    """The centres of all objects of a name."""
    return _template(ids, ids.point, [*hints(refs), *texts(name)])


def segment_prompt(ids: TokenIds, name: Sequence[int], refs: Sequence[Ref] = ()) -> list[Token]:
    """The outline of one object of a name."""
    return _template(ids, ids.segment, [*hints(refs), *texts(name)])
