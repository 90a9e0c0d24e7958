"""Records as the documents cite them: figures, a link, the commit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
