"""A release: its changelog, preparation and publication, and what its distributions hold."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release import build, install, publish, versions
from release.build import (
    ALL,
    CLIENT,
    ROOT,
    SERVER,
    TINY,
    Environment,
    ReleaseError,
    dependencies,
    file_names,
)
from release.publish import Publication

# ---------------------------------------------------------------- changelog
# CHANGELOG.md has the form of Keep a Changelog, and a release cuts it.

TEXT = """\
# Changelog

All notable changes.

## [Unreleased]

### Added

- A thing.

## [0.2.0] - 2026-11-01

### Fixed

- Another.

## [0.1.0] - 2026-10-01

### Added

- The first.

[Unreleased]: https://example.org/unreleased
[0.2.0]: https://example.org/0.2.0
[0.1.0]: https://example.org/0.1.0
"""


def test_the_changelog_has_the_form():
    """This repository's own, with something to release or a release."""
    parsed = publish.parse_changelog((ROOT / "CHANGELOG.md").read_text())
    assert parsed.releases[0].body or parsed.latest


def test_what_was_parsed_is_written_as_it_was():
    """Cutting a release changes no other line."""
    assert publish.parse_changelog(TEXT).text() == TEXT


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("## [Unreleased]\n", "## [0.3.0] - 2026-11-02\n", "the first release is not [Unreleased]"),
        ("## [Unreleased]\n", "## [Unreleased] - 2026-11-02\n", "line 5 is neither"),
        ("## [0.2.0] - 2026-11-01", "## 0.2.0 - 2026-11-01", "line 11 is neither"),
        ("## [0.2.0] - 2026-11-01", "## [0.2.0]", "line 11 is neither"),
        ("[0.2.0] - ", "[0.2] - ", "line 11 is neither"),
        ("[0.1.0]: https://example.org/0.1.0\n", "", "[0.1.0] has no link at the end"),
    ],
)
def test_a_fault_is_named(old, new, fault):
    """Each rule finds the fault it is for."""
    assert old in TEXT
    with pytest.raises(ReleaseError) as raised:
        publish.parse_changelog(TEXT.replace(old, new))
    assert fault in str(raised.value)


def test_a_cut_dates_what_is_unreleased():
    """The entries become those of the version, and the links follow."""
    parsed = publish.parse_changelog(TEXT)
    parsed.cut("0.3.0", "2026-11-23")
    cut = publish.parse_changelog(parsed.text())
    assert [release.version for release in cut.releases[:3]] == ["Unreleased", "0.3.0", "0.2.0"]
    assert cut.latest is not None
    assert (cut.latest.version, cut.latest.date) == ("0.3.0", "2026-11-23")
    assert cut.notes("0.3.0") == "### Added\n\n- A thing."
    assert not cut.releases[0].body
    assert cut.links["0.3.0"].endswith("/compare/v0.2.0...v0.3.0")
    assert cut.links["Unreleased"].endswith("/compare/v0.3.0...main")


def test_nothing_is_cut_from_nothing():
    """A release without entries is refused."""
    parsed = publish.parse_changelog(TEXT.replace("### Added\n\n- A thing.\n\n", ""))
    with pytest.raises(ReleaseError, match=r"no entries under \[Unreleased\]"):
        parsed.cut("0.3.0", "2026-11-23")


# ---------------------------------------------------------------- publish
# A release is prepared in all places, and stops at what makes a commit no release.

FILES = {place.path for place in (*versions.VERSIONS, *versions.REVISIONS, versions.MODULE)}
FILES |= {"CHANGELOG.md", "buf.yaml", "proto/breaking.py"}
FOLDERS = ("proto/legato", "proto/third_party")
ENTRIES = """\
# Changelog

## [Unreleased]

### Added

- A thing.

[Unreleased]: https://example.org/
"""


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Make a committed copy of what a release reads and writes, never released."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            patch.delenv(name)
        for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
            patch.setenv(name, os.devnull)
        for who in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{who}_NAME", "somebody")
            patch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
        patch.setenv("GOGC", "off")  # buf ends before its garbage is worth a collection
        yield made_tree(tmp_path_factory.mktemp("committed"))


@pytest.fixture
def tree(committed, tmp_path):
    """Return a test's own copy of it."""
    return shutil.copytree(committed, tmp_path / "tree")


def made_tree(root):
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name)
    versions.write_baseline(root, versions.revision(root))
    (root / "CHANGELOG.md").write_text(ENTRIES)
    git(root, "init", "--quiet", "--initial-branch", "main")
    commit(root)
    return root


def git(root, *arguments):
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a commit")


def grow(root):
    """Add a field to the versions."""
    path = root / "proto/legato/v1/geometry.proto"
    end = "}\n"  # of the first message
    path.write_text(path.read_text().replace(end, f"  // How far.\n  float z = 99;\n{end}", 1))


def test_a_release_is_prepared_in_all_places(tree):
    """Versions, changelog and baseline; the next one needs entries and a higher version."""
    grow(tree)
    publish.prepare(tree, "0.7.0", "2026-11-23")
    assert versions.version(tree) == "0.7.0"
    log = publish.parse_changelog((tree / "CHANGELOG.md").read_text())
    assert log.latest is not None
    assert (log.latest.version, log.latest.date) == ("0.7.0", "2026-11-23")
    versions.check_baseline(tree, versions.revision(ROOT))
    with pytest.raises(ReleaseError, match=r"0\.7\.0 is not above 0\.7\.0"):
        publish.prepare(tree, "0.7.0", "2026-11-24")
    with pytest.raises(ReleaseError, match=r"no entries under \[Unreleased\]"):
        publish.prepare(tree, "0.8.0", "2026-11-24")


def test_a_prepared_commit_passes_up_to_the_build(tree, capsys):
    """Commit, changelog and contract are in order; this copy has nothing to build."""
    publish.prepare(tree, "0.7.0", "2026-11-23")
    commit(tree)
    with pytest.raises(ReleaseError, match="-m build"):
        release(tree)
    assert capsys.readouterr().out.splitlines()[-1] == "release: distributions"


def release(root, is_rehearsal=False):
    Publication(root, root / "dist", is_rehearsal).run()


def test_an_unprepared_commit_is_no_release(tree):
    """Its changelog has no such heading."""
    with pytest.raises(ReleaseError, match=r"CHANGELOG\.md has no \["):
        release(tree)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda root: (root / "new.py").touch(), "1 files are not committed"),
        (lambda root: git(root, "tag", "clients/go/v0.7.0"), "the tags clients/go/v0.7.0 exist"),
        (lambda root: versions.VERSIONS[3].write(root, "0.6.9"), "these must be equal"),
        (lambda root: versions.REVISIONS[1].write(root, "2000"), "these must be equal"),
        (
            lambda root: versions.MINIMUM.write(root, "2000"),
            "minimum_client_revision 2000 is above",
        ),
    ],
    ids=["dirty", "tagged", "version", "revision", "minimum"],
)
def test_what_stops_a_prepared_release(tree, spoil, fault):
    """Each is found before anything is built."""
    publish.prepare(tree, "0.7.0", "2026-11-23")
    commit(tree)
    spoil(tree)
    with pytest.raises(ReleaseError, match=fault):
        release(tree)


def test_a_rehearsal_reports_what_stops_a_release(tree, capsys):
    """It goes on to the distributions, which are missing here."""
    (tree / "new.py").touch()
    with pytest.raises(ReleaseError, match="run `make dist`"):
        release(tree, is_rehearsal=True)
    reported = capsys.readouterr().out
    assert "would stop here: 1 files are not committed" in reported
    assert "would stop here: CHANGELOG.md has no [" in reported


def test_the_revision_grows_with_the_contract(tree):
    """By one for each release with additions, and otherwise not at all."""
    revision = versions.revision(ROOT)
    check = functools.partial(versions.check_revision, tree, is_first=False)
    check(revision)
    with pytest.raises(ReleaseError, match="is that of the last release"):
        check(revision + 1)
    grow(tree)
    check(revision + 1)
    for wrong in (revision, revision + 2):
        with pytest.raises(ReleaseError, match="has grown since the last release"):
            check(wrong)
    versions.check_revision(tree, revision, is_first=True)


def test_a_broken_contract_is_not_prepared(tree):
    """A release cannot make a break the new baseline."""
    path = tree / "proto/legato/v1/geometry.proto"
    path.write_text(path.read_text().replace("float y = 2 ", "float z = 3 ", 1))
    with pytest.raises(ReleaseError, match="breaks clients of revision-"):
        publish.prepare(tree, "0.7.0", "2026-11-23")
    assert versions.version(tree) == versions.version(ROOT)


def test_tags_are_rehearsed_in_a_clone(tree, tmp_path):
    """Both are annotated and name the commit; the repository gets none."""
    clone = versions.rehearse(tree, tmp_path, "0.7.0", "- A thing.\n# not a comment")
    assert sorted(versions.existing(clone, "0.7.0")) == ["clients/go/v0.7.0", "v0.7.0"]
    for name in versions.names("0.7.0"):
        assert git(clone, "rev-parse", f"{name}^{{commit}}") == git(tree, "rev-parse", "HEAD")
        assert "# not a comment" in git(clone, "cat-file", "tag", name)
    assert versions.existing(tree, "0.7.0") == []


def test_the_go_module_has_the_suffix_of_its_major_version(tree):
    """Go refuses a tag v2 of a module whose path does not end with /v2."""
    versions.check_module(tree, "1.9.0")
    with pytest.raises(ReleaseError, match=r"the module of v2\.0\.0 is .*/clients/go/v2, not "):
        versions.check_module(tree, "2.0.0")


@pytest.mark.slow  # downloads into an empty module cache and compiles grpc-go
def test_go_gets_the_tagged_module(tmp_path):
    """From a clone in place of the forge: the module resolves, has its licence, and compiles."""
    if shutil.which("go") is None:
        pytest.skip("no go")
    clone = versions.rehearse(ROOT, tmp_path, "0.0.999", "rehearsed")
    cached, proxies = go(tmp_path, "env", "GOMODCACHE", "GOPROXY").split()
    environment = {
        "GOMODCACHE": str(tmp_path / "modules"),
        "GOFLAGS": "-modcacherw",
        "GOPROXY": f"file://{cached}/cache/download,{proxies}",
        "GOPRIVATE": "github.com/legato-vlm",
        "GOSUMDB": "off",  # its entries of our dependencies are in the module's go.sum
        "GOWORK": "off",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{clone}.insteadOf",
        "GIT_CONFIG_VALUE_0": publish.REPOSITORY,
    }
    robot = tmp_path / "robot"
    robot.mkdir()
    package = f"{versions.GO_MODULE}/legato"
    (robot / "main.go").write_text(
        f'package main\n\nimport "{package}"\n\nfunc main() {{ println(legato.Version) }}\n'
    )
    go(robot, "mod", "init", "example.org/robot", **environment)
    go(robot, "get", f"{package}@v0.0.999", **environment)
    assert versions.version(ROOT) in go(robot, "run", ".", **environment)
    fetched = tmp_path / "modules" / f"{versions.GO_MODULE}@v0.0.999"
    assert (fetched / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def go(folder, *arguments, **environment):
    done = subprocess.run(
        ["go", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def project(distribution):
    path = ROOT / distribution.folder / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]


@pytest.mark.parametrize("distribution", ALL, ids=lambda each: each.name)
def test_a_distribution_has_its_name_urls_and_licence_texts(distribution):
    """Each text that the licence expression needs is a file of the distribution."""
    declared = project(distribution)
    assert declared["name"] == distribution.name
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(declared["urls"])
    folder = ROOT / distribution.folder
    texts = "".join((folder / name).read_text() for name in declared["license-files"])
    heads = {"Apache-2.0": "Apache License\n", "MIT": "MIT License\n"}
    for licence in declared["license"].split(" AND "):
        assert heads[licence] in texts


def test_the_apache_licence_is_the_same_everywhere():
    """Each distribution has a copy, as none can name a file outside its folder."""
    texts = {(ROOT / each.folder / "LICENSE").read_text() for each in ALL}
    assert len(texts) == 1


def test_the_notice_names_all_art_that_was_trained_on():
    """Each author and licence of the model card's table."""
    card = (ROOT / "engine/tiny/legato_tiny/MODEL_CARD.md").read_text()
    notice = " ".join((ROOT / "engine/tiny/NOTICE").read_text().split())
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (?:trained on|background)", card, re.MULTILINE)
    assert len(rows) == 8
    for work, author, licence in rows:
        plain = [re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text) for text in (work, author, licence)]
        first_word = re.split(r"[\s,:]", plain[0])[0].lower().replace("_", " ").split()[0]
        assert first_word in notice.lower(), work
        assert plain[1].split(" (")[0] in notice, author
        assert plain[2] in notice, licence
    for url in re.findall(r"https://creativecommons.org/licenses/by/\d\.\d/", card):
        assert url in notice


def test_the_server_has_the_dependencies_of_the_command_line():
    """`legato demo` draws: what `legato[cli]` brings, `legato[engine]` brings."""

    def names(requirements):
        return {re.split(r"[^\w-]", text)[0] for text in requirements}

    cli = project(CLIENT)["optional-dependencies"]["cli"]
    assert names(cli) <= names(project(SERVER)["dependencies"])


def test_a_build_that_differs_is_found(tmp_path):
    """A changed byte and a missing file."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        for name in ("a.whl", "b.whl"):
            (folder / name).write_text(name)
    assert build.differences(one, other) == []
    (one / "a.whl").write_text("changed")
    (other / "c.whl").write_text("only here")
    assert build.differences(one, other) == ["a.whl", "c.whl"]


def test_the_sums_are_of_the_files(tmp_path):
    """A distribution that was changed after it was built is refused, and another version."""
    names = file_names("1.2.3")
    assert len(names) == 2 * len(ALL)
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / build.SUMS).write_text(build.sums(tmp_path, names))
    build.check_sums(tmp_path, "1.2.3")
    with pytest.raises(ReleaseError, match=r"lacks legato-1\.2\.4"):
        build.check_sums(tmp_path, "1.2.4")
    (tmp_path / TINY.wheel("1.2.3")).write_text("changed")
    with pytest.raises(ReleaseError, match="is of other files"):
        build.check_sums(tmp_path, "1.2.3")


def test_weights_in_another_wheel_are_found(tmp_path, wheel):
    """Only the model's wheel has weights."""
    for distribution, names in install.CONTENTS.items():
        wheel(distribution.name, "1.2.3", files=list(names))
    install.check_contents(tmp_path, "1.2.3")
    wheel("legato", "1.2.3", files=[*install.CONTENTS[CLIENT], "legato/v1/model.safetensors"])
    with pytest.raises(ReleaseError, match="carries weights"):
        install.check_contents(tmp_path, "1.2.3")
    wheel("legato", "1.2.3", files=install.CONTENTS[CLIENT][1:])
    with pytest.raises(ReleaseError, match=r"lacks legato/v1/descriptor\.binpb"):
        install.check_contents(tmp_path, "1.2.3")


def test_versions_and_revisions_agree_in_this_tree():
    """The places that a release writes."""
    versions.parse(versions.version(ROOT))
    assert versions.revision(ROOT) >= 1


# ---------------------------------------------------------------- environments
# Clean environments lend what is declared, and the bill of materials is of what is installed.


def test_dependencies_follow_extras_and_markers(wheel):
    """Of wheels through their metadata, of others through what is installed."""
    wheels = [
        wheel("base", "1", ["packaging", "server==1; extra == 'engine'", "rich; extra == 'cli'"]),
        wheel("server", "1", ["base==1", "iniconfig", "torch; sys_platform == 'plan9'"]),
    ]
    assert dependencies(wheels, "base") == ["packaging"]
    assert dependencies(wheels, "base[engine]") == ["iniconfig", "packaging"]
    assert dependencies(wheels, "base[cli]") == [*RICH, "rich"]


RICH = ["markdown-it-py", "mdurl", "packaging", "pygments"]


def test_a_dependency_that_is_not_installed_is_named(wheel):
    """It cannot be lent."""
    with pytest.raises(ReleaseError, match="no-such-distribution is not installed"):
        dependencies([wheel("base", "1", ["No.Such-Distribution"])], "base")


def test_only_what_is_lent_can_be_imported(tmp_path):
    """An undeclared dependency fails, although it lies beside this interpreter."""
    clean = Environment(tmp_path / "venv")
    clean.lend(["packaging"])
    clean.run(clean.python, "-c", "import packaging")
    with pytest.raises(ReleaseError, match="No module named 'pytest'"):
        clean.run(clean.python, "-c", "import pytest")


def test_a_bill_of_materials_has_what_is_installed(tmp_path):
    """The server is its subject, what was lent its components, and no file is named."""
    clean = Environment(tmp_path / "venv")
    clean.lend(["packaging"])
    install.describe(clean, tmp_path / "bill.json", "0")
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert bill["metadata"]["component"]["name"] == "legato-server"
    assert [each["name"] for each in bill["components"]] == ["packaging"]


# ---------------------------------------------------------------- imports
# What each package imports is declared by its own distribution.

# Imported by callers who have it: an array is an image; videos, bags, DDS and GGUF files are read
# by packages of extras.
CLIENTS_EXTRAS = {"av", "cyclonedds", "mcap", "mcap_ros2", "numpy"}
OPTIONAL = {
    "legato_client": CLIENTS_EXTRAS,
    "legato_service": set(),
    "legato_engine": {"gguf", "torchvision"},
}
PACKAGES = [
    ("clients/python/legato_client", CLIENT),
    ("service/legato_service", SERVER),
    ("engine/legato_engine", SERVER),
]


def declared(distribution, *extras):
    """Return the direct requirements, and those of these extras."""
    read = tomllib.loads((ROOT / distribution.folder / "pyproject.toml").read_text())["project"]
    texts = [*read["dependencies"]]
    for extra in extras:
        texts += read["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def imported(folder):
    """Return the top-level modules that a folder imports, without the standard library's."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    names = {name.partition(".")[0] for name in found}
    return {name for name in names if name and name not in sys.stdlib_module_names}


@cache
def providers():
    found = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(name) for name in names} for module, names in found.items()}


def undeclared(modules, requirements):
    foreign = {module for module in modules if not module.startswith("legato")}
    return {module for module in foreign if not providers().get(module, set()) & requirements}


@pytest.mark.parametrize(("folder", "distribution"), PACKAGES, ids=[p for p, _ in PACKAGES])
def test_imports_are_declared(folder, distribution):
    """Also those that only a rare path imports."""
    if distribution is SERVER:
        requirements = declared(SERVER) | declared(CLIENT)  # required with the same version
    else:
        requirements = declared(CLIENT, "cli", "web", "mcp", "compat")
    modules = imported(ROOT / folder)
    assert len(modules) > 3
    assert undeclared(modules, requirements) == OPTIONAL[folder.rpartition("/")[2]]


def test_an_undeclared_import_is_found():
    """The control: a module of another distribution, and one of none."""
    assert undeclared({"grpc", "pytest", "nowhere"}, {"grpcio"}) == {"pytest", "nowhere"}


# ---------------------------------------------------------------- untrusted files
# No code of the product runs what a file says, or fetches anything from the network.

PULL = ROOT / "engine/legato_engine/hub/download.py"

PRODUCT = ("engine/legato_engine", "engine/tiny", "service", "clients/python")

FORBIDDEN_MODULES = frozenset(
    {
        "aiohttp",
        "cloudpickle",
        "dill",
        "ftplib",
        "http.client",
        "httpx",
        "huggingface_hub",
        "joblib",
        "marshal",
        "requests",
        "shelve",
        "urllib.request",
        "urllib3",
        "yaml",
    }
)
FORBIDDEN_CALLS = frozenset(
    {
        "eval",
        "exec",
        "jinja2.Environment",
        "jinja2.Template",
        "os.popen",
        "os.system",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "runpy.run_path",
        "torch.hub.load",
        "torch.jit.load",
    }
)
UNSAFE_KEYWORDS = {"shell": True, "trust_remote_code": True, "allow_pickle": True}


def findings(source: str) -> Iterator[str]:
    """What is wrong in a module, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS:
                    yield f"{node.lineno}: imports {name}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    return [node.module or "", *(f"{node.module}.{name}" for name in names)]


def _in_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {
        each.arg: each.value.value
        for each in node.keywords
        if each.arg and isinstance(each.value, ast.Constant)
    }
    if name in FORBIDDEN_CALLS:
        yield f"{node.lineno}: calls {name}"
    if name == "torch.load" and keywords.get("weights_only") is not True:
        yield f"{node.lineno}: calls torch.load without weights_only"
    for keyword, unsafe in UNSAFE_KEYWORDS.items():
        if keywords.get(keyword) is unsafe:
            yield f"{node.lineno}: passes {keyword}={unsafe}"


def test_only_pull_reaches_what_downloads():
    """No module of a server imports it, directly or over another one of the package."""
    modules = {path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    reach = {
        path.relative_to(ROOT)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        if {"legato_engine.hub.download"} & {*_imported(node)}
    }
    assert not reach, "its command is loaded by name"


@pytest.mark.parametrize("folder", PRODUCT)
def test_the_product_runs_and_fetches_nothing(folder):
    """Weights are tensors, settings are JSON, templates are sandboxed; nothing is downloaded.

    But by `legato pull`, whose one file of downloads no process of a server imports.
    """
    modules = sorted({*(ROOT / folder).rglob("*.py")} - {PULL})
    assert modules
    found = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in modules
        for finding in findings(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import yaml",
        "from urllib import request",
        "import urllib.request",
        "from pickle import loads",
        "import pickle\npickle.load(file)",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "jinja2.Template(text)",
    ],
)
def test_each_rule_finds_what_it_forbids(source):
    """The control: the rules are not empty."""
    assert list(findings(source))


def test_what_is_safe_is_not_found():
    """The product's own way to read tensors, and to name pickle's error."""
    safe = "import pickle\ntorch.load(path, weights_only=True)\nexcept_ = pickle.UnpicklingError"
    assert not list(findings(safe))


@pytest.fixture
def wheel(tmp_path):
    """Return a function that writes a wheel with metadata and files of one byte into `tmp_path`."""

    def write(name, version, requires=(), files=()):
        stem = f"{name.replace('-', '_')}-{version}"
        path = tmp_path / f"{stem}-py3-none-any.whl"
        metadata = [f"Name: {name}", f"Version: {version}"]
        metadata += [f"Requires-Dist: {each}" for each in requires]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata))
            for file in files:
                inside = file.replace("licenses/", f"{stem}.dist-info/licenses/", 1)
                archive.writestr(inside, "-")
        return path

    return write
