"""docs/reliability.md: every row of the fault table names tests, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| ([0-9]+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)(?:::(test_[a-z0-9_]+))?`")
WITHOUT_TEST = {"32"}  # the page says why


def rows():
    return [match.groups() for match in ROW.finditer(PAGE.read_text())]


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_all_faults_are_listed():
    assert [int(number) for number, *_ in rows()] == list(range(1, 34))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_tests_of_a_row_exist(row):
    number, _, _, tests = row
    named = TEST.findall(tests)
    assert bool(named) != (number in WITHOUT_TEST)
    for name, function in named:
        path = ROOT / name
        assert path.is_file(), f"no {name}"
        assert not function or function in functions(path), f"no {function} in {name}"
