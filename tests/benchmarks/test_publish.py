"""The tables and drawings that the documents show of records."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import publish
from benchmarks.publish import tables
from benchmarks.publish.records import Records

ROOT = publish.ROOT
OUTPUTS = publish.outputs(ROOT)
RECORD = re.compile(r"\]\(([^)\s]*benchmarks/results/[^)\s]+\.(?:md|json))\)")

# Records of before records had to name a commit of this repository, cited with that remark.
WITHOUT_COMMIT = {
    "h200/adapters": "not recorded",
    "reference_moondream2_full_h200_2026-11-21": "not recorded",
    "reference_moondream2_tiny_2026-11-21": "of a branch that was rewritten",
}


def cited() -> list[str]:
    """Return the names of all records that README.md and docs/performance.md link to."""
    names = set()
    for document in publish.DOCUMENTS:
        for link in RECORD.findall((ROOT / document).read_text()):
            names.add(link.partition("benchmarks/results/")[2].rpartition(".")[0])
    return sorted(names)


def commits(name: str) -> set[str]:
    """Return the commits that a record names."""
    document = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    members = [document] if "surroundings" in document else document.values()
    return {member["surroundings"].get("commit") or "" for member in members}


def exists(commit: str) -> bool:
    """Say whether this repository has the commit."""
    command = ("git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}")
    return bool(commit) and subprocess.run(command, check=False, stderr=-3).returncode == 0


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.name)
def test_tables_and_drawings_are_current(path: Path) -> None:
    """`make bench-tables` would change nothing."""
    assert path.read_text() == OUTPUTS[path], "run make bench-tables"


def test_every_table_is_shown() -> None:
    """Each table that can be made stands in a document."""
    texts = "".join((ROOT / name).read_text() for name in publish.DOCUMENTS)
    assert set(re.findall(r"<!-- table: (\w+) -->", texts)) == set(tables.TABLES)


@pytest.mark.parametrize("name", cited())
def test_records_name_a_commit_of_this_repository(name: str) -> None:
    """Each record that the documents cite exists, and so does its commit."""
    if (
        subprocess.run(
            ("git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"),
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        != "false"
    ):
        pytest.skip("needs the whole history: this is a shallow clone, or there is no git")
    known = all(exists(commit) for commit in commits(name))
    assert known != (name in WITHOUT_COMMIT), f"{name}: {commits(name)}"


def test_a_row_of_another_commit_is_marked() -> None:
    """A table that joins commits says so, and one that does not, does not."""
    records = Records(ROOT)
    for name, make in tables.TABLES.items():
        text = make(records)
        found = {c for link in RECORD.findall(text) for c in commits(_name(link))}
        if name != "repeats":  # names the commit of each of its rows
            assert ("different commits" in text) == (len(found) > 1), name


def _name(link: str) -> str:
    return link.partition("benchmarks/results/")[2].rpartition(".")[0]


@pytest.mark.parametrize("path", [p for p in OUTPUTS if p.suffix == ".svg"], ids=lambda p: p.name)
def test_drawings_are_well_formed(path: Path) -> None:
    """Each drawing is XML with a title that a screen reader can tell."""
    root = ElementTree.fromstring(OUTPUTS[path])
    assert root.findtext("{http://www.w3.org/2000/svg}title")


def test_a_stale_document_is_found(tmp_path: Path) -> None:
    """Only what stands between the markers is replaced."""
    text = "before\n<!-- table: gain -->\nold\n<!-- end of table -->\nafter\n"
    filled = publish.filled(text, Records(ROOT))
    assert filled.startswith("before\n<!-- table: gain -->\n\n| two launches")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in filled
