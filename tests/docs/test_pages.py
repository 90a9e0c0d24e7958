"""Pages name what exists, their links lead somewhere, and their snippets run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from legato_service import arguments

from benchmarks.publish.records import DOCUMENTS, Records, check, problems
from tests.docs.snippets import PAGES, PATIENCE, Reader, pages_of, snippets
from tests.e2e.server import ENVIRONMENT

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LEFT_OUT = ("build/", "dist/", "site/", "node_modules/", "engine/tiny/build/")


def pages() -> list[Path]:
    """Return all Markdown files that are not ignored by git; without git, those of the tree."""
    command = ("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md")
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")]
    hidden = re.compile(r"(^|/)\.")
    return sorted(
        ROOT / name
        for name in names
        if not name.startswith(_LEFT_OUT) and not hidden.search(name) and (ROOT / name).exists()
    )


def prose(text: str) -> str:
    """Remove fenced code and inline code, in which brackets are not links."""
    return _CODE.sub("``", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: GitHub's for its headings, and explicit ones."""
    found: set[str] = set(re.findall(r'<a id="([^"]+)"', text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


# ---------------------------------------------------------------- links

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|<img[^>]+src=\"([^\"]+)\"")


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and images that are not on the web."""
    found = [one or other for one, other in LINK.findall(prose(page.read_text()))]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_and_anchors_exist(page: Path) -> None:
    """Each local link of a page names a file or folder, and each anchor one of its headings."""
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            broken.append(f"{target}: no such file")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text()):
            broken.append(f"{target}: no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_of_the_docs_can_be_reached() -> None:
    """Each page of docs/ is reached from README.md by links."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    docs = {page for page in pages() if page.is_relative_to(ROOT / "docs")}
    assert docs <= seen, sorted(str(page.relative_to(ROOT)) for page in docs - seen)


# ---------------------------------------------------------------- paths

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


# ---------------------------------------------------------------- docs/grpc-pitfalls.md

PITFALLS = (ROOT / "docs/grpc-pitfalls.md").read_text()
NAMED_TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PITFALLS)


@pytest.mark.parametrize(("file", "test"), NAMED_TESTS)
def test_every_test_that_is_named_is_there(file, test):
    """A test that is removed or renamed changes its row."""
    assert re.search(
        rf"^(async )?def {test}\(" if test else "", (ROOT / file).read_text(), re.MULTILINE
    )


def test_every_row_names_one():
    """Every row but the last, which is about all of them."""
    rows = [line for line in PITFALLS.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == rows[-1:]


# ---------------------------------------------------------------- figures

STEP = "h200/some:rows[streams=8,path=loop].ms"


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """A record with two rows and a figure whose name has spaces."""
    rows = [{"streams": n, "path": "loop", "ms": n + 0.046} for n in (1, 8)]
    path = tmp_path / "benchmarks" / "results" / "h200" / "some.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"figures": {"rows": rows, "of 8x1": {"share": 0.196}}}))
    return Records(tmp_path)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_figure_has_a_record(name: str) -> None:
    """Each figure is in a generated table, or its tag computes it from a record."""
    assert not [found for found in check(ROOT) if found.startswith(name)]


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
    assert not list(problems(text, records))


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
    assert any(problem in found for found in problems(text, records))


def test_a_false_figure_in_a_document_is_found(tmp_path: Path) -> None:
    """The check reads all three documents, and names the one with the planted figure."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name in DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert not check(tmp_path)
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(f"{text}\nA step takes 0.12 ms.\n")
        (problem,) = check(tmp_path)
        assert problem.startswith(f"{name}: '0.12' has no record")
        (tmp_path / name).write_text(text)


# ---------------------------------------------------------------- docs/reliability.md

RELIABILITY = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| ([0-9]+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)(?:::(test_[a-z0-9_]+))?`")
WITHOUT_TEST = {"32"}  # the page says why


def rows():
    return [match.groups() for match in ROW.finditer(RELIABILITY.read_text())]


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


# ---------------------------------------------------------------- docs/configuration.md


def test_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The page names each option of the help text, and no other."""
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    offered = set(re.findall(r"(--[a-z-]+)", capsys.readouterr().out)) - {"--help"}
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"`(--[a-z-]+)", page)) == offered


# ---------------------------------------------------------------- docs/observability.md


def test_the_table_is_what_the_catalogue_says() -> None:
    """`python docs/metrics_table.py` writes it."""
    path = ROOT / "docs" / "metrics_table.py"
    spec = importlib.util.spec_from_file_location("metrics_table", path)
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.PAGE.read_text() == written.page()


FIRST = ("README.md", *pages_of(["First steps"]))
"""Pages that a newcomer reads; the others' snippets are `make test-slow`'s."""

PATIENT = pytest.mark.timeout(2 * PATIENCE)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Of all pages: most of a page's time is its server's start."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("engine", "clients", "examples", "proto"):
        (folder / name).symlink_to(ROOT / name)
    samples = ROOT / "engine/tiny/legato_tiny/samples"
    (folder / "street.jpg").write_bytes((samples / "street.jpg").read_bytes())
    path = (str(Path(sys.executable).parent), str(ROOT / ".tools" / "bin"), os.environ["PATH"])
    with Reader(folder, {**ENVIRONMENT, "PATH": os.pathsep.join(path)}, clone=False) as reader:
        yield reader


@PATIENT
@pytest.mark.parametrize(
    "page",
    [*FIRST, *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page not in FIRST)],
)
def test_the_snippets_of_a_page_run(page: str, reader: Reader) -> None:
    """In page order on two cores; each shows what its page says."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        reader.read(page)
    finally:
        os.sched_setaffinity(0, cores)


@PATIENT
def test_whatever_is_not_run_says_why() -> None:
    """A snippet is run, or its page names the reason."""
    for page in PAGES:
        for snippet in snippets(page):
            assert snippet.how in {"", "clone", "quiet"} or snippet.reason, snippet
            served = re.search(r"^legato (serve|http|playground)\b.*&$", snippet.text, re.MULTILINE)
            assert not served, f"{snippet}: what serves has a terminal of its own"
