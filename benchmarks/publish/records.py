"""Records as the documents cite them: figures, a link, the commit."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = "benchmarks/results"
Row = Mapping[str, Any]
STREAMS = (1, 8, 32)  # that the tables show


class Records:
    """The records of a tree; `seen_from` is the folder of the document that links to them."""

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        self._root = root
        self._folder = folder or root

    def seen_from(self, folder: Path) -> Records:
        """Return the same records with links that are relative to `folder`."""
        return Records(self._root, folder)

    def figures(self, name: str) -> Any:
        """Return the figures of a record; `name` is a path below the results, without suffix."""
        return self._document(name)["figures"]

    def newest(self, pattern: str, *parts: str) -> str:
        """Return the latest record whose name matches and whose figures have all these parts."""
        found = {}
        for path in (self._root / RESULTS).glob(f"{pattern}.json"):
            document = json.loads(path.read_text())
            if all(document["figures"].get(part) for part in parts):
                found[document["surroundings"]["date"]] = path.stem
        return found[max(found)]

    def rows(self, name: str) -> Sequence[Row]:
        """Return the rows of a record."""
        rows: Sequence[Row] = self.figures(name)["rows"]
        return rows

    def row(self, name: str, **wanted: object) -> Row:
        """Return the only row whose fields are those."""
        found = [
            row
            for row in self.rows(name)
            if all(row.get(field) == value for field, value in wanted.items())
        ]
        assert len(found) == 1, f"{len(found)} rows of {name} are {wanted}"
        return found[0]

    def members(self, name: str) -> Mapping[str, Any]:
        """Return the records in a file that holds several, by name."""
        members: Mapping[str, Any] = self._document(name)
        return members

    def link(self, name: str, words: str = "") -> str:
        """Link a record's file."""
        path = self._root / RESULTS / f"{name}.json"
        return f"[{words or Path(name).name}]({os.path.relpath(path, self._folder)})"

    def cite(self, name: str) -> str:
        """Link a record and name its commit and date."""
        commit = self._document(name)["surroundings"].get("commit")
        known = f"commit `{commit}`" if commit else "commit not recorded"
        return f"{self.link(name)} ({known}, {self.date(name)})"

    def date(self, name: str) -> str:
        """Return the day of a record."""
        date: str = self._document(name)["surroundings"]["date"]
        return date[:10]

    def commits(self, *names: str) -> set[str]:
        """Return the commits of records."""
        return {self._document(name)["surroundings"].get("commit") or "" for name in names}

    def _document(self, name: str) -> Any:
        return json.loads((self._root / RESULTS / f"{name}.json").read_text())


def sources(records: Records, *names: str, labels: Mapping[str, str] | None = None) -> str:
    """Cite the records of a table; `labels` say which figures are of which record."""
    shown = labels or dict.fromkeys(names, "")
    cited = "; ".join(f"{shown[name]} {records.cite(name)}".strip() for name in names)
    several = len(records.commits(*names)) > 1
    note = " Figures of different records are of different commits." if several else ""
    return f"\n\nRecord{'s' if len(names) > 1 else ''}: {cited}.{note}"


# ---------------------------------------------------------------- claims
# The figures in the documents' prose, checked against the records that they come from.
#
# A figure is a number with a unit of time, a rate, a ratio or a percentage. It lies in a generated
# table, or its sentence is followed by a tag that computes each of its figures:
#
#     The request takes 19.3 ms.
#     <!-- record: 19.3 = h200/e2e:rows[workload=new,callers=1,tokens=3].p50 -->
#
# A tag holds `FIGURE = EXPRESSION`, separated by `;`. An expression joins numbers and values of
# records by `+`, `-`, `*` and `/` with spaces around them, from left to right. A value is
# `RECORD:PATH`, or `RECORD@RUN:PATH` in a file of several runs; a path has `.key`, `[index]` or
# `[key=value,...]` for the only row with those fields. The result, times 100 for a percentage, is
# the figure at the figure's number of decimals.


DOCUMENTS = ("README.md", "docs/performance.md", "CHANGELOG.md")
_TAG = re.compile(r"<!-- record: (.*?) -->", re.DOTALL)
_NOT_PROSE = (
    re.compile(r"<!-- table: (\w+) -->.*?<!-- end of table -->", re.DOTALL),
    re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL),
    re.compile(r"`[^`\n]+`"),
    re.compile(r"(?<=\])\([^)]*\)"),  # the address of a link
)
_NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?!\.?\d)"
_PER = r"(?: ?/ ?s\b| (?:a|per|each) (?:second|minute)\b)"
_UNIT = (
    r"(?:ms|us|µs|ns|s|(?:milli|micro|nano)?seconds?|minutes?|per ?cent|times|x|fold"
    rf"|(?:[kKMGT]i?)?B{_PER}|\w+{_PER})(?!\w)"
)
_FIGURES = re.compile(  # several numbers may share a unit: 19.0 to 20.2 ms
    rf"{_NUMBER}(?:\s*(?:,|/|–|to|and|or|by)\s*{_NUMBER})*[\s-]?(?:%|{_UNIT})"
)
_DECIMAL = re.compile(r"(?<![\w.,-])\d[\d,]*\.\d+(?!\.?\d)(?!\w)")
_IN_WORDS = re.compile(
    r"\b(?:(?:twice|(?:two|three|four|five|six|seven|eight|nine|ten) times)(?= (?:as|the|\w+er)\b)"
    r"|(?:two|three|four|five|six|seven|eight|nine|ten) (?:percent|ms|milliseconds)\b"
    r"|(?:an?|one|two|three|four)[ -](?:third|quarter|fifth|sixth|seventh|eighth|ninth|tenth)s?\b"
    r"|half (?:of )?(?:the|its|as)\b)",
    re.IGNORECASE,
)
_BARE = re.compile(r"[~*]*[\d.,]+ ?%?[*]*")  # a cell of a table by hand
_HAS_UNIT = re.compile(rf"%|\b{_UNIT}|/s\b")
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=-->))\s+(?!<!--)")
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A sentence or a row of a table, the figures that it states, and its tags."""

    text: str
    figures: tuple[str, ...]
    tags: tuple[str, ...]


def problems(text: str, records: Records) -> Iterator[str]:
    """Find the figures of a document that no record holds, and tags of no figure."""
    for claim in claims(text):
        known: dict[str, str] = {}
        for part in ";".join(claim.tags).split(";"):
            figure, is_equation, expression = part.partition("=")
            if is_equation:
                known[figure.strip()] = expression.strip()
            elif part.strip():
                yield f"{part.strip()!r} is no `FIGURE = EXPRESSION`: {claim.text}"
        for figure in claim.figures:
            if figure in known:
                yield from _difference(figure, known[figure], records, claim)
            elif not figure[0].isdigit():
                yield f"{figure!r} is a figure in words; write a number: {claim.text}"
            else:
                yield f"{figure!r} has no record: {claim.text}"
        for figure in sorted(known.keys() - set(claim.figures)):
            yield f"{figure!r} is tagged, but not stated: {claim.text}"


def claims(text: str) -> Iterator[Claim]:
    """Yield the sentences and rows by hand that state a figure or have a tag."""
    for pattern in _NOT_PROSE:
        text = pattern.sub(" ", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |#)", text):
        rows = block.strip().startswith("|")
        for sentence in _rows(block) if rows else _SENTENCE_END.split(block):
            stated = _TAG.sub(" ", sentence)
            found = tuple(_figures(stated, is_row=rows))
            tags = tuple(_TAG.findall(sentence))
            if found or tags:
                head, _, cells = stated.rpartition("\n")
                yield Claim(" ".join((cells if rows and head else stated).split()), found, tags)


def value(expression: str, records: Records) -> float:
    """Compute an expression of a tag.

    Raises:
        LookupError: A record has no such value.
        OSError: There is no such record.
        ValueError: The expression is malformed.
    """
    if ":" not in expression:
        raise ValueError("the expression names no record")
    first, *rest = re.split(r"\s+([-+*/])\s+", expression)
    result = _term(first, records)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = _OPERATORS[sign](result, _term(term, records))
    return result


def check(root: Path) -> list[str]:
    """List the problems of all documents."""
    found = []
    for name in DOCUMENTS:
        text = (root / name).read_text()
        found += [f"{name}: {problem}" for problem in problems(text, Records(root))]
    return found


def _rows(block: str) -> Iterator[str]:
    """Yield each row of a table below the table's head, which may name the unit."""
    head, *rows = block.strip().splitlines()
    yield head
    for row in rows:
        yield f"{head if _HAS_UNIT.search(head) else ''}\n{row}"


def _figures(text: str, *, is_row: bool) -> Iterator[str]:
    found = {number for each in _FIGURES.findall(text) for number in re.findall(_NUMBER, each)}
    found |= set(_IN_WORDS.findall(text))
    if found and not is_row:
        found |= set(_DECIMAL.findall(text))
    if is_row and _HAS_UNIT.search(text):
        cells = (cell.strip() for cell in text.partition("\n")[2].split("|"))
        found |= {cell.strip("~*% ") for cell in cells if _BARE.fullmatch(cell)}
    percent = set(re.findall(rf"({_NUMBER})(?=\s?(?:%|per ?cent))", text))
    return iter(sorted(f"{each} %" if each in percent else each for each in found))


def _difference(figure: str, expression: str, records: Records, claim: Claim) -> Iterator[str]:
    number = figure.removesuffix(" %").replace(",", "")
    decimals = len(number.partition(".")[2])
    try:
        result = value(expression, records) * (100 if figure.endswith("%") else 1)
    except (LookupError, OSError, TypeError, ValueError) as error:
        yield f"{figure!r} = {expression}: {error!r}: {claim.text}"
        return
    if abs(result - float(number)) > 0.5 * 10**-decimals + 1e-9:
        yield f"{figure!r} is {result:.{decimals + 2}f} by {expression}: {claim.text}"


def _term(term: str, records: Records) -> float:
    name, has_path, path = term.strip().partition(":")
    if not has_path:
        return float(name)
    name, has_run, run = name.partition("@")
    found: Any = records.members(name)[run]["figures"] if has_run else records.figures(name)
    for key, selector in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if key:
            found = found[key]
        elif "=" not in selector:
            found = found[int(selector)]
        else:
            wanted = dict(each.split("=") for each in selector.split(","))
            (found,) = (
                row for row in found if all(str(row.get(k)) == v for k, v in wanted.items())
            )
    return float(found)
