"""docs/grpc-pitfalls.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/grpc-pitfalls.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_test_that_is_named_is_there(file, test):
    """A test that is removed or renamed changes its row."""
    assert re.search(
        rf"^(async )?def {test}\(" if test else "", (ROOT / file).read_text(), re.MULTILINE
    )


def test_every_row_names_one():
    """Every row but the last, which is about all of them."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == rows[-1:]
