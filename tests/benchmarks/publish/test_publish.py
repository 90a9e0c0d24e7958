"""The tables and drawings that the documents show of records."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import publish
from benchmarks.publish import claims, tables
from benchmarks.publish.records import Records
from benchmarks.publish.summary import SOURCES
from benchmarks.publish.tables import peers

ROOT = publish.ROOT
OUTPUTS = publish.outputs(ROOT)
SUMMARISED = set(SOURCES.values())
RECORD = re.compile(r"\]\(([^)\s]*benchmarks/results/[^)\s]+\.(?:md|json))\)")

# Records from before the rule that a record names a commit; the page says so beside their links.
WITHOUT_COMMIT = {
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


def git(*command: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository."""
    return subprocess.run(
        ("git", "-C", str(ROOT), *command), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.name)
def test_tables_and_drawings_are_current(path: Path) -> None:
    """`make bench-tables` would change nothing."""
    assert path.read_text() == OUTPUTS[path], "run make bench-tables"


def test_every_table_is_shown() -> None:
    """Each table is in a document."""
    texts = "".join((ROOT / name).read_text() for name in publish.DOCUMENTS)
    assert set(re.findall(r"<!-- table: (\w+) -->", texts)) == set(tables.TABLES)


@pytest.mark.parametrize("name", cited())
def test_records_name_a_commit_of_this_repository(name: str) -> None:
    """Each record that the documents cite exists, and so does its commit."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history: this is a shallow clone, or there is no git")
    known = all(
        git("cat-file", "-e", f"{each}^{{commit}}").returncode == 0 for each in commits(name)
    )
    assert known != (name in WITHOUT_COMMIT), f"{name}: {commits(name)}"


def test_a_row_of_another_commit_is_marked() -> None:
    """A table that joins commits says so, and one that does not, does not."""
    records = Records(ROOT)
    for name, make in tables.TABLES.items():
        text = make(records)
        found = {c for link in RECORD.findall(text) for c in commits(_name(link))}
        assert ("different commits" in text) == (len(found) > 1), name


def _name(link: str) -> str:
    return link.partition("benchmarks/results/")[2].rpartition(".")[0]


@pytest.mark.parametrize("path", [p for p in OUTPUTS if p.suffix == ".svg"], ids=lambda p: p.name)
def test_drawings_are_well_formed(path: Path) -> None:
    """Each drawing is XML with a title that a screen reader can tell."""
    root = ElementTree.fromstring(OUTPUTS[path])
    assert root.findtext("{http://www.w3.org/2000/svg}title")


def test_an_absent_peer_is_marked(tmp_path: Path) -> None:
    """A peer's earlier figures are marked as not of the record's run, with the latest date."""
    peer = {"peer": "vllm", "name": "vLLM", "versions": {}, "rows": []}
    earlier = [{"streams": 1, "step_ms": 1.65, "version": "0.24.0"}]
    document = {
        "surroundings": {"date": "2026-11-21T12:00:00+00:00", "commit": "abc1234"},
        "figures": {"peers": [peer | {"not_of_this_run": earlier}, peer | {"not_of_this_run": []}]},
    }
    path = tmp_path / "benchmarks" / "results" / "h200" / "peers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    ((name, steps, source),) = peers(Records(tmp_path))
    assert name == "vLLM 0.24.0, another H200, by 2026-11-21, **not of this run**"
    assert (steps, source) == (["1.65", "-", "-"], "none")


def test_a_stale_document_is_found(tmp_path: Path) -> None:
    """Only what stands between the markers is replaced."""
    text = "before\n<!-- table: gain -->\nold\n<!-- end of table -->\nafter\n"
    filled = publish.filled(text, Records(ROOT))
    assert filled.startswith("before\n<!-- table: gain -->\n\n| two launches")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in filled


def unread() -> list[str]:
    """Return the files of results that no page, table, figure, script or test reads."""
    read = {f"{folder}/{name}" for folder in ("h100", "h200") for name in ("summary", *SUMMARISED)}
    with pytest.MonkeyPatch.context() as patch:
        of_name = Records._document

        def noted(own: Records, name: str) -> object:
            read.add(name)
            return of_name(own, name)

        patch.setattr(Records, "_document", noted)
        publish.outputs(ROOT)
        claims.check(ROOT)
    files = git("ls-files", "-co", "--exclude-standard").stdout.splitlines()
    results = "benchmarks/results/"
    texts = "".join(
        (ROOT / name).read_text()
        for name in files
        if name.endswith((".md", ".py", ".toml", ".sh")) and not name.startswith(results)
        if (ROOT / name).exists()
    )
    mentioned = set(re.findall(r"results/((?:h\d+/)?[\w-]+)(?:\.(?:md|json|txt|svg))\b", texts))
    mentioned |= {name for name in stems(files) if re.search(rf"[\"'`]{name}[\"'`]", texts)}
    return [
        name
        for name in files
        if name.startswith(results) and (ROOT / name).exists()
        if name.removeprefix(results).rpartition(".")[0] not in read | mentioned
    ]


def stems(files: list[str]) -> set[str]:
    """Return the records of a list of files, as the tables name them."""
    results = "benchmarks/results/"
    names = (name.removeprefix(results) for name in files if name.startswith(results))
    return {name.rpartition(".")[0] for name in names if "/" in name}


def test_every_record_is_read() -> None:
    """`results/` keeps no record that nothing reads; git has the others."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs git")
    assert not unread(), "delete them"
