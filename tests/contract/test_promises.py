"""Every part of the contract is filled in a test, or says that it is reserved for later."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

from tests.contract import schema
from tests.contract.recording import WORDS

ROOT = Path(__file__).parents[2]
FILLED = json.loads(Path(__file__).with_name("filled.json").read_text())
"""By part of the contract the test that fills it; `recording.py` writes it."""

RESERVED = "Reserved for later"


def parts() -> dict[str, str]:
    """Fields, values of enums and words, with their comments; unspecified values say nothing."""
    found = {}
    for element in schema.elements():
        if element.name.startswith("FieldLimit."):  # an option, which no message holds
            continue
        if element.kind == "field" or (
            element.kind == "value" and not element.name.endswith("_UNSPECIFIED")
        ):
            found[element.name] = element.comment
        if element.name in WORDS:
            names = re.findall(r"`([a-z0-9_.]+)`", element.comment)
            found |= {f"{element.name}: {name}": element.comment for name in names}
    return found


@functools.cache
def names_of_tests(path: str) -> set[str]:
    """The tests of a file by name; none where there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    functions = (each for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if each.name.startswith("test_")}


def test_every_part_is_filled_or_reserved():
    """A part that no test fills says so in its comment, and one that is filled does not."""
    known = parts()
    reserved = {name for name, comment in known.items() if RESERVED in comment}
    missing = known.keys() - FILLED.keys() - reserved
    assert not missing, f"fill them in a test, or write {RESERVED!r}: {sorted(missing)}"
    assert not reserved & FILLED.keys()


def test_every_test_that_fills_a_part_exists():
    """The table names tests by file and function, of parts that there are."""
    gone = {
        part: test
        for part, test in FILLED.items()
        if test.partition("::")[2] not in names_of_tests(test.partition("::")[0])
    }
    assert not gone
    assert not FILLED.keys() - parts().keys()
