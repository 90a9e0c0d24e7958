"""Every snippet of README.md, the quickstarts and the guides runs and shows something."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import PAGES, PATIENCE, ROOT, Reader, pages_of, snippets
from tests.e2e.server import ENVIRONMENT

FIRST = ("README.md", *pages_of(["First steps"]))
"""Pages that a newcomer reads; the others' snippets are `make test-slow`'s."""

pytestmark = pytest.mark.timeout(2 * PATIENCE)


@pytest.mark.parametrize(
    "page",
    [*FIRST, *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page not in FIRST)],
)
def test_the_snippets_of_a_page_run(page: str, tmp_path: Path) -> None:
    """In page order against a fresh server on two cores; each shows what its page says."""
    for name in ("engine", "clients", "examples", "proto"):
        (tmp_path / name).symlink_to(ROOT / name)
    samples = ROOT / "engine/tiny/legato_tiny/samples"
    (tmp_path / "street.jpg").write_bytes((samples / "street.jpg").read_bytes())
    path = (str(Path(sys.executable).parent), str(ROOT / ".tools" / "bin"), os.environ["PATH"])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        with Reader(
            tmp_path, {**ENVIRONMENT, "PATH": os.pathsep.join(path)}, clone=False
        ) as reader:
            reader.read(page)
    finally:
        os.sched_setaffinity(0, cores)


def test_whatever_is_not_run_says_why() -> None:
    """A snippet is run, or its page names the reason."""
    for page in PAGES:
        for snippet in snippets(page):
            assert snippet.how in {"", "clone", "quiet"} or snippet.reason, snippet
            served = re.search(r"^legato (serve|http|playground)\b.*&$", snippet.text, re.MULTILINE)
            assert not served, f"{snippet}: what serves has a terminal of its own"
