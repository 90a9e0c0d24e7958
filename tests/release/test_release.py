"""A release: its changelog, its preparation and its publication."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest

from release import changelog, contract, publish, tags, versions
from release.distributions import ROOT
from release.process import ReleaseError
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
    parsed = changelog.parse((ROOT / "CHANGELOG.md").read_text())
    assert parsed.releases[0].body or parsed.latest


def test_what_was_parsed_is_written_as_it_was():
    """Cutting a release changes no other line."""
    assert changelog.parse(TEXT).text() == TEXT


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
        changelog.parse(TEXT.replace(old, new))
    assert fault in str(raised.value)


def test_a_cut_dates_what_is_unreleased():
    """The entries become those of the version, and the links follow."""
    parsed = changelog.parse(TEXT)
    parsed.cut("0.3.0", "2026-11-23")
    cut = changelog.parse(parsed.text())
    assert [release.version for release in cut.releases[:3]] == ["Unreleased", "0.3.0", "0.2.0"]
    assert cut.latest is not None
    assert (cut.latest.version, cut.latest.date) == ("0.3.0", "2026-11-23")
    assert cut.notes("0.3.0") == "### Added\n\n- A thing."
    assert not cut.releases[0].body
    assert cut.links["0.3.0"].endswith("/compare/v0.2.0...v0.3.0")
    assert cut.links["Unreleased"].endswith("/compare/v0.3.0...main")


def test_nothing_is_cut_from_nothing():
    """A release without entries is refused."""
    parsed = changelog.parse(TEXT.replace("### Added\n\n- A thing.\n\n", ""))
    with pytest.raises(ReleaseError, match=r"no entries under \[Unreleased\]"):
        parsed.cut("0.3.0", "2026-11-23")


# ---------------------------------------------------------------- publish
# A release is prepared in all places, and stops at what makes a commit no release.

FILES = {place.path for place in (*versions.VERSIONS, *versions.REVISIONS, tags.MODULE)}
FILES |= {"CHANGELOG.md", "buf.yaml", "proto/breaking.py"}
FOLDERS = ("proto/legato", "proto/third_party")
ENTRIES = """\
# Changelog

## [Unreleased]

### Added

- A thing.

[Unreleased]: https://example.org/
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a committed copy of what a release reads and writes, never released."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
    root = tmp_path / "tree"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name)
    contract.write_baseline(root, versions.revision(root))
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
    """Add a field to the contract."""
    path = root / "proto/legato/v1/geometry.proto"
    end = "}\n"  # of the first message
    path.write_text(path.read_text().replace(end, f"  // How far.\n  float z = 99;\n{end}", 1))


def test_a_release_is_prepared_in_all_places(tree):
    """Versions, changelog and baseline; the next one needs entries and a higher version."""
    grow(tree)
    publish.prepare(tree, "0.7.0", "2026-11-23")
    assert versions.version(tree) == "0.7.0"
    log = changelog.parse((tree / "CHANGELOG.md").read_text())
    assert log.latest is not None
    assert (log.latest.version, log.latest.date) == ("0.7.0", "2026-11-23")
    contract.check_baseline(tree, versions.revision(ROOT))
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
    check = functools.partial(contract.check_revision, tree, is_first=False)
    check(revision)
    with pytest.raises(ReleaseError, match="is that of the last release"):
        check(revision + 1)
    grow(tree)
    check(revision + 1)
    for wrong in (revision, revision + 2):
        with pytest.raises(ReleaseError, match="has grown since the last release"):
            check(wrong)
    contract.check_revision(tree, revision, is_first=True)


def test_a_broken_contract_is_not_prepared(tree):
    """A release cannot make a break the new baseline."""
    path = tree / "proto/legato/v1/geometry.proto"
    path.write_text(path.read_text().replace("float y = 2 ", "float z = 3 ", 1))
    with pytest.raises(ReleaseError, match="breaks clients of revision-"):
        publish.prepare(tree, "0.7.0", "2026-11-23")
    assert versions.version(tree) == versions.version(ROOT)


def test_tags_are_rehearsed_in_a_clone(tree, tmp_path):
    """Both are annotated and name the commit; the repository gets none."""
    clone = tags.rehearse(tree, tmp_path, "0.7.0", "- A thing.\n# not a comment")
    assert sorted(tags.existing(clone, "0.7.0")) == ["clients/go/v0.7.0", "v0.7.0"]
    for name in tags.names("0.7.0"):
        assert git(clone, "rev-parse", f"{name}^{{commit}}") == git(tree, "rev-parse", "HEAD")
        assert "# not a comment" in git(clone, "cat-file", "tag", name)
    assert tags.existing(tree, "0.7.0") == []


def test_the_go_module_has_the_suffix_of_its_major_version(tree):
    """Go refuses a tag v2 of a module whose path does not end with /v2."""
    tags.check_module(tree, "1.9.0")
    with pytest.raises(ReleaseError, match=r"the module of v2\.0\.0 is .*/clients/go/v2, not "):
        tags.check_module(tree, "2.0.0")


@pytest.mark.slow  # downloads into an empty module cache and compiles grpc-go
def test_go_gets_the_tagged_module(tmp_path):
    """From a clone in place of the forge: the module resolves, has its licence, and compiles."""
    if shutil.which("go") is None:
        pytest.skip("no go")
    clone = tags.rehearse(ROOT, tmp_path, "0.0.999", "rehearsed")
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
        "GIT_CONFIG_VALUE_0": changelog.REPOSITORY,
    }
    robot = tmp_path / "robot"
    robot.mkdir()
    package = f"{tags.GO_MODULE}/legato"
    (robot / "main.go").write_text(
        f'package main\n\nimport "{package}"\n\nfunc main() {{ println(legato.Version) }}\n'
    )
    go(robot, "mod", "init", "example.org/robot", **environment)
    go(robot, "get", f"{package}@v0.0.999", **environment)
    assert versions.version(ROOT) in go(robot, "run", ".", **environment)
    fetched = tmp_path / "modules" / f"{tags.GO_MODULE}@v0.0.999"
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
