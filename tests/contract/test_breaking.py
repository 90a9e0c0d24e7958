"""`make proto-breaking` lets additions through and nothing else."""

from __future__ import annotations

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
    f"GIT_{who}_{what}": "somebody@example.org"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


class Repository:
    """A repository with a copy of the contract, committed but not released."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copy(ROOT / "buf.yaml", folder)
        for part in ("legato", "third_party"):
            shutil.copytree(ROOT / "proto" / part, folder / "proto" / part)
        self.git("init", "--quiet", "--initial-branch", "main")
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

    def check(self) -> subprocess.CompletedProcess[str]:
        """Return the command of `make proto-breaking`, for a repository's root."""
        return check(self._folder)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the working tree."""
    return subprocess.run(
        [sys.executable, str(ROOT / "proto" / "breaking.py")],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
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


def test_without_a_release_nothing_can_break(repository: Repository) -> None:
    """Before the first tag the check passes and says why."""
    repository.change("geometry", "  float y = 2;\n", "")
    checked = repository.check()
    assert checked.returncode == 0
    assert "no release yet" in checked.stdout


def test_a_tag_that_is_no_release_is_passed_over(repository: Repository) -> None:
    """Only tags v* are releases."""
    repository.git("tag", "nightly")
    assert "no release yet" in repository.check().stdout


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
        ("geometry", "  float y = 2;\n", ""),
        ("geometry", "  float y_max = 4;", "  float y_max = 5;"),
        ("geometry", "  float y_max = 4;", "  double y_max = 4;"),
        ("geometry", "  float y_max = 4;", "  float bottom = 4;"),
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
    assert "breaks clients of v0.1.0" in checked.stdout


def test_a_break_is_caught_before_it_is_committed(released: Repository, tmp_path: Path) -> None:
    """The working tree is what is checked."""
    (tmp_path / "proto" / "legato" / "v1" / "image.proto").unlink()
    assert released.check().returncode != 0


@pytest.mark.parametrize("is_released", [False, True])
def test_a_shallow_clone_does_not_pass_for_unreleased(
    repository: Repository, tmp_path: Path, is_released: bool
) -> None:
    """Without the history of a release the check fails and says what to do."""
    if is_released:
        repository.git("tag", "v0.1.0")
    repository.change("geometry", "// One point.", "// A point.")
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--depth", "1", f"file://{tmp_path}", str(clone))
    checked = check(clone)
    assert checked.returncode == is_released
    assert ("git fetch --unshallow" in checked.stdout) == is_released
