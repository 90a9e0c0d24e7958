"""`make proto-breaking` lets additions through and nothing else, in every clone."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# No setting of the machine's reaches these repositories, and no repository that the tests run in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
ENVIRONMENT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
ENVIRONMENT |= {
    "GOGC": "off"
}  # buf ends before its garbage is worth a collection, half of its work
ENVIRONMENT |= {
    f"GIT_{who}_{what}": "somebody@example.org"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


@functools.cache
def image() -> bytes:
    """Return this tree's contract as buf's image."""
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "build", "--exclude-source-info", "--output", "-"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


class Repository:
    """A repository with a copy of the contract and its baseline, committed but not released."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copy(ROOT / "buf.yaml", folder)
        for part in ("legato", "third_party"):
            shutil.copytree(ROOT / "proto" / part, folder / "proto" / part)
        self.git("init", "--quiet", "--initial-branch", "main")
        (folder / "proto" / "baseline").mkdir()
        (folder / "proto" / "baseline" / "revision-7.binpb").write_bytes(image())
        self.commit()

    def git(self, *arguments: str) -> None:
        """Run git in the repository."""
        subprocess.run(["git", *arguments], cwd=self._folder, env=ENVIRONMENT, check=True)

    def commit(self) -> None:
        """Commit all changes."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a commit")

    def change(self, noun: str, old: str, new: str) -> None:
        """Replace `old`, which occurs once, with `new`, and commit."""
        path = self._folder / "proto" / "legato" / "v1" / f"{noun}.proto"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        self.commit()

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the command of `make proto-breaking` at the repository's root."""
        return check(self._folder, *options)


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Check the working tree."""
    return subprocess.run(
        [sys.executable, str(ROOT / "proto" / "breaking.py"), *options],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Return the contract in a repository of its own."""
    return Repository(tmp_path)


@pytest.fixture
def released(repository: Repository) -> Repository:
    """Return the contract, released and with later commits."""
    repository.git("tag", "v0.1.0")
    repository.change("geometry", "// One point.", "// A point.")
    return repository


def test_this_repository_has_a_baseline() -> None:
    """The contract is compared with something in every clone, also without tags."""
    checked = check(ROOT)
    assert checked.returncode == 0, checked.stdout
    assert "nothing breaks clients of revision-" in checked.stdout


@pytest.mark.parametrize("is_tagged", [False, True])
def test_without_a_baseline_nothing_passes(
    repository: Repository, tmp_path: Path, is_tagged: bool
) -> None:
    """A missing baseline is a failure, not a comparison with nothing."""
    if is_tagged:
        repository.git("tag", "v0.1.0")
    (tmp_path / "proto" / "baseline" / "revision-7.binpb").unlink()
    checked = repository.check()
    assert checked.returncode != 0
    assert "nothing is compared" in checked.stdout


def test_a_second_baseline_is_a_failure(repository: Repository, tmp_path: Path) -> None:
    """Which of two is the last release's would be a guess."""
    (tmp_path / "proto" / "baseline" / "revision-8.binpb").touch()
    assert repository.check().returncode != 0


def test_a_break_is_caught_without_a_tag(repository: Repository) -> None:
    """The baseline suffices: a clone without tags compares as well."""
    repository.change("geometry", "  float center_y = 2;\n", "")
    checked = repository.check()
    assert checked.returncode != 0
    assert "legato/v1/geometry.proto" in checked.stdout
    assert "breaks clients of revision-7" in checked.stdout


def test_a_rewritten_baseline_hides_no_break(released: Repository) -> None:
    """The tag of a release is compared with, too."""
    released.change("geometry", "  float center_y = 2;\n", "")
    assert released.check("--write", "7").returncode == 0
    released.commit()
    checked = released.check()
    assert checked.returncode != 0
    assert "nothing breaks clients of revision-7" in checked.stdout
    assert "this breaks clients of v0.1.0" in checked.stdout


def test_writing_a_baseline_replaces_the_last(released: Repository, tmp_path: Path) -> None:
    """A release has one baseline, named by its contract revision."""
    assert released.check("--write", "8").returncode == 0
    (written,) = (tmp_path / "proto" / "baseline").iterdir()
    assert written.name == "revision-8.binpb"
    assert released.check().returncode == 0


def test_a_tag_that_is_no_release_is_passed_over(repository: Repository) -> None:
    """Only tags v* are releases of the contract: those of the Go module repeat them."""
    repository.git("tag", "nightly")
    repository.git("tag", "clients/go/v0.1.0")
    checked = repository.check()
    assert checked.returncode == 0, checked.stdout
    assert "v0.1.0" not in checked.stdout


def test_an_addition_passes(released: Repository) -> None:
    """A new optional field and a new comment are compatible."""
    field = "  optional float confidence = 3;\n  // Names"
    addition = "  optional float confidence = 3;\n  // How sure.\n  float area = 9;\n  // Names"
    released.change("geometry", field, addition)
    checked = released.check()
    assert checked.returncode == 0, checked.stdout
    assert "nothing breaks clients of v0.1.0" in checked.stdout


@pytest.mark.parametrize(
    ("noun", "old", "new"),
    [
        ("geometry", "  float center_y = 2;\n", ""),
        ("geometry", "  float height = 4;", "  float height = 5;"),
        ("geometry", "  float height = 4;", "  double height = 4;"),
        ("geometry", "  float height = 4;", "  float bottom = 4;"),
        ("error", "  ERROR_REASON_INTERNAL = 23;\n", ""),
        ("session", "returns (stream SessionResponse)", "returns (SessionResponse)"),
    ],
    ids=["field gone", "number", "type", "name", "value gone", "no more a stream"],
)
def test_a_break_is_caught(released: Repository, noun: str, old: str, new: str) -> None:
    """An incompatible change fails, and the error names the file and the release."""
    released.change(noun, old, new)
    checked = released.check()
    assert checked.returncode != 0
    assert f"proto/legato/v1/{noun}.proto" in checked.stdout
    assert "this breaks clients of revision-7" in checked.stdout
    assert "this breaks clients of v0.1.0" in checked.stdout


def test_a_break_is_caught_before_it_is_committed(released: Repository, tmp_path: Path) -> None:
    """The working tree is what is checked."""
    (tmp_path / "proto" / "legato" / "v1" / "image.proto").unlink()
    assert released.check().returncode != 0


def test_a_contract_that_does_not_compile_fails(repository: Repository) -> None:
    """What cannot be compared does not pass."""
    repository.change("geometry", "  float center_y = 2;\n", "  float center_y = ;\n")
    assert repository.check().returncode != 0
