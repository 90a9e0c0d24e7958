"""Paths that pages name exist; `tests/contract/test_pitfalls.py` checks the tests they cite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages

CODE = re.compile(r"`([^`\n]+)`")
# Pages of today's tree: the log, records and the changelog describe their own day.
TODAY = [
    page
    for page in pages()
    if page.parent in {ROOT, ROOT / "docs", ROOT / "docs" / "design"}
    and page.name not in {"CHANGELOG.md", "contract.md"}
]
ROOTS = (
    ROOT,
    ROOT / "engine" / "legato_engine",
    ROOT / "service" / "legato_service",
    ROOT / "clients" / "python" / "legato_client",
)
FOLDERS = {
    "benchmarks",
    "clients",
    "docs",
    "engine",
    "examples",
    "proto",
    "service",
    "tests",
    "training",
}
WRITTEN_LATER = {"site/", ".venv", "dist", "dist/NOTES.md", ".legato-commit"}  # by make targets


def named(page: Path) -> list[str]:
    """Return what a page quotes as code and looks like a path of this repository."""
    found = []
    for text in CODE.findall(page.read_text()):
        path = text.partition("::")[0]
        is_file = re.fullmatch(r"[\w./-]+\.(py|cu|cuh|md|sh|proto|toml|json)", path)
        is_folder = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", path)
        is_below = re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path) and path.split("/")[0] in FOLDERS
        if (is_file and "/" in path) or is_folder or is_below:
            found.append(text)
    return [text for text in found if text not in WRITTEN_LATER]


def exists(path: str) -> bool:
    """Say whether a path exists below one of the roots that pages name paths from."""
    return any((root / path).exists() for root in ROOTS)


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """Each path that a page quotes is a file or a folder of this tree."""
    missing = [text for text in named(page) if not exists(text.partition("::")[0])]
    assert not missing, missing


def test_the_architecture_names_files() -> None:
    """The pattern above finds the paths of the page that needs it most."""
    assert len(named(ROOT / "docs" / "architecture.md")) >= 25


def test_each_step_of_a_detect_names_a_class_of_its_file() -> None:
    """At most 25 steps, each with a class as its subject that the named file defines."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| \d+ \| \*\*(\w+)\*\* .*\| (.*) \|$", page, re.MULTILINE)
    assert 20 <= len(steps) <= 25
    for component, files in steps:
        found = [root / path for path in CODE.findall(files) for root in ROOTS]
        texts = [path.read_text() for path in found if path.is_file()]
        assert any(re.search(rf"^class {component}\b", text, re.MULTILINE) for text in texts), (
            f"{files} define no {component}"
        )
