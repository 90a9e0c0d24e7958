"""Every performance figure of README.md, docs/performance.md and CHANGELOG.md is a record's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.publish import claims
from benchmarks.publish.records import Records

ROOT = Path(__file__).parents[2]
STEP = "h200/some:rows[streams=8,path=loop].ms"


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """A record with two rows and a figure whose name has spaces."""
    rows = [{"streams": n, "path": "loop", "ms": n + 0.046} for n in (1, 8)]
    path = tmp_path / "benchmarks" / "results" / "h200" / "some.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"figures": {"rows": rows, "of 8x1": {"share": 0.196}}}))
    return Records(tmp_path)


@pytest.mark.parametrize("name", claims.DOCUMENTS)
def test_every_figure_has_a_record(name: str) -> None:
    """Each figure is in a generated table, or its tag computes it from a record."""
    assert not [found for found in claims.check(ROOT) if found.startswith(name)]


@pytest.mark.parametrize(
    "text",
    [
        f"A step takes 8.05 ms. <!-- record: 8.05 = {STEP} -->",
        f"A step takes 8.0 ms <!-- record: 8.0 = {STEP} -->, which is short.",
        f"| a step | 8.05 ms <!-- record: 8.05 = {STEP} --> |",
        f"It is 7.7 times as long. <!-- record: 7.7 = {STEP} / h200/some:rows[0].ms -->",
        "It takes 20 % of it. <!-- record: 20 % = h200/some:of 8x1.share -->",
        f"From 1.0 to 8.0 ms. <!-- record: 1.0 = h200/some:rows[0].ms; 8.0 = {STEP} -->",
        f"It takes 8,046 us. <!-- record: 8,046 = {STEP} * 1000 -->",
        "<!-- table: gain -->\n| step, ms | 3.21 |\n<!-- end of table -->",
        "```sh\nsleep 3 s\n```\n\nSee `--limit 3 s` and [a link](x/3-ms.md), an image of 850x600.",
        "Python 3.11, 6 GB of disk and 16 rows, in one of three places.",
    ],
)
def test_true_figures_pass(text: str, records: Records) -> None:
    """A figure passes at the number of decimals that it states; other numbers need no record."""
    assert not list(claims.problems(text, records))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"A step takes 8.06 ms. <!-- record: 8.06 = {STEP} -->", "'8.06' is 8.0460"),
        (f"It takes 21 %. <!-- record: 21 % = {STEP} -->", "'21 %' is 804.60"),
        ("A step takes 8.05 ms.", "'8.05' has no record"),
        ("It serves 70 answers/s.", "'70' has no record"),
        ("It serves 70 requests a second.", "'70' has no record"),
        ("It reads 3 TB/s.", "'3' has no record"),
        ("It is 2.2x faster.", "'2.2' has no record"),
        ("It takes 8 to 9 ms.", "'8' has no record"),
        ("One takes 8 ms, the other 9.5.", "'9.5' has no record"),
        ("At a fifth of the CPU.", "'a fifth' is a figure in words"),
        ("It is twice as fast.", "'twice' is a figure in words"),
        ("| step, ms |\n| --- |\n| 8.05 |", "'8.05' has no record"),
        ("| of | value |\n| --- | --- |\n| a step, ms | 8.05 |", "'8.05' has no record"),
        (f"A step is short. <!-- record: 8.05 = {STEP} -->", "'8.05' is tagged, but not stated"),
        ("It takes 8 ms. <!-- record: h200/some -->", "is no `FIGURE = EXPRESSION`"),
        ("It takes 8 ms. <!-- record: 8 = h200/none:rows[0].ms -->", "FileNotFoundError"),
        ("It takes 8 ms. <!-- record: 8 = h200/some:rows[7].ms -->", "IndexError"),
        ("It takes 8 ms. <!-- record: 8 = h200/some:rows[streams=9].ms -->", "ValueError"),
        ("It takes 8 ms. <!-- record: 8 = 8 -->", "names no record"),
        (f"8 ms. <!-- record: 8 = {STEP} --> Another takes 8 ms.", "'8' has no record"),
    ],
)
def test_planted_figures_are_found(text: str, problem: str, records: Records) -> None:
    """A false figure, one without a tag, and a tag that computes nothing are named."""
    assert any(problem in found for found in claims.problems(text, records))


def test_a_false_figure_in_a_document_is_found(tmp_path: Path) -> None:
    """The check reads all three documents, and names the one with the planted figure."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name in claims.DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert not claims.check(tmp_path)
    for name in claims.DOCUMENTS:
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(f"{text}\nA step takes 0.12 ms.\n")
        (problem,) = claims.check(tmp_path)
        assert problem.startswith(f"{name}: '0.12' has no record")
        (tmp_path / name).write_text(text)
