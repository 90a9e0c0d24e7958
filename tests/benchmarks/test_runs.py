"""Runs of benchmarks: the commit that a record names, and the options of all."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.__main__ import BENCHMARKS, TOOLS, main, run

# ---------------------------------------------------------------- provenance
# The commit that a record names.


def git(root: Path, *command: str) -> str:
    """Run git in `root`, as an author of its own."""
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ("git", "-C", str(root), *author, *command), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean working copy with two files."""
    monkeypatch.delenv(record.ALLOW_DIRTY, raising=False)
    root = tmp_path / "tree"
    (root / "engine").mkdir(parents=True)
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "engine" / "step.py").write_text("STEP = 1\n")
    (root / ".gitignore").write_text(f"/{record.STAMP}\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "one")
    return root


def packed(tree: Path) -> Path:
    """Pack the tree and remove its repository, as on a machine without git."""
    record.pack(tree)
    (tree / ".git").rename(tree.parent / "elsewhere.git")
    return tree


def test_a_clean_tree_names_its_commit(tree: Path) -> None:
    """A record of a clean working copy names HEAD."""
    commit = record.recordable(tree)
    assert git(tree, "rev-parse", "HEAD").startswith(commit)
    assert len(commit) >= 7


@pytest.mark.parametrize("path", ["engine/step.py", "engine/new.py"])
def test_a_dirty_tree_is_refused(tree: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed or an untracked file stops a record, and `--dirty` makes the record say so."""
    (tree / path).write_text("STEP = 2\n")
    with pytest.raises(record.DirtyTreeError, match=path):
        record.recordable(tree)
    monkeypatch.setenv(record.ALLOW_DIRTY, "1")
    assert record.recordable(tree).endswith("-dirty")


def test_records_do_not_make_a_tree_dirty(tree: Path) -> None:
    """A record may be followed by another one without a commit between them."""
    (tree / "benchmarks" / "results" / "decode.json").write_text("{}")
    assert "dirty" not in record.recordable(tree)


def test_a_packed_tree_names_its_commit(tree: Path) -> None:
    """Without git the commit comes from the stamp."""
    commit = record.recordable(tree)
    assert record.recordable(packed(tree)) == commit


def test_a_copied_worktree_uses_its_stamp(tree: Path) -> None:
    """The `.git` file of a worktree may be copied without its repository."""
    commit = record.recordable(tree)
    (packed(tree) / ".git").write_text("gitdir: /nowhere\n")
    assert record.recordable(tree) == commit


def test_a_file_changed_after_packing_is_noticed(tree: Path) -> None:
    """The stamp does not vouch for a file that is not the commit's."""
    (packed(tree) / "engine" / "step.py").write_text("STEP = 2\n")
    with pytest.raises(record.DirtyTreeError, match=r"engine/step\.py"):
        record.recordable(tree)


def test_without_git_and_stamp_there_is_no_record(tree: Path) -> None:
    """No environment variable and no guess names the commit."""
    (tree / ".git").rename(tree.parent / "elsewhere.git")
    with pytest.raises(record.DirtyTreeError, match="pack"):
        record.recordable(tree)


def test_a_dirty_tree_is_not_packed(tree: Path) -> None:
    """The stamp of a dirty tree would name a commit that the tree is not."""
    (tree / "engine" / "step.py").write_text("STEP = 2\n")
    with pytest.raises(record.DirtyTreeError):
        record.pack(tree)


def test_an_archive_holds_the_tree_and_its_stamp(tree: Path, tmp_path: Path) -> None:
    """The archive can be unpacked and measured elsewhere."""
    record.pack(tree, tmp_path / "legato.tar.gz")
    with tarfile.open(tmp_path / "legato.tar.gz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert record.recordable(tmp_path / "there" / "legato") == record.recordable(tree)


# ---------------------------------------------------------------- small runs
# Benchmarks that a CPU runs in a few seconds, and the options of all.

MODEL = "--device cpu --threads 1 --model random-tiny --random-weights"
SIZE = "--width 128 --height 96"
RUNS = {
    "decode": f"{MODEL} --streams 1 --length 24 --repeats 1",
    "drafting_paths": f"{MODEL} --streams 1 --length 16 --context 40 --repeats 1",
    "fp8": "--device cpu --crops 2 --repeats 1 --limit 0.2",
    "hop": f"{MODEL} {SIZE} --calls 1 --block 1 --tokens 1",
    "image": f"{MODEL} --sizes 128x96 --repeats 1 --device-stages",
    "intake": f"{SIZE} --calls 1 --block 1",
    "lift": "--scenes 1",
    "lone": f"{SIZE} --calls 1 --tokens 1 -- --model random-tiny --device cpu",
    "loops": f"{MODEL} --streams 1 --length 12 --context 40 --repeats 1"
    " --joins 1 --load 8 --steps 20",
    "loops alone": f"{MODEL} --streams 1 --length 3 --context 20 --repeats 1"
    " --joins 0 --load 0 --steps 0",
    "parts": f"{MODEL} --callers 2 --words 20 --tokens 16 --turns 1",
    "prompts": f"{MODEL} --lengths 32 --repeats 1",
    "telemetry": "--turns 1 --calls 1 --name telemetry",
    "access": "--blocks 1 --calls 1",
    "tick": "--ticks 1",
    "robot": "--seconds 0.2 --loads 1 --kills 1 --servers scripted",
    "rpc": f"{SIZE} --alone 1 --callers 1 --calls 1 -- --model null",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_writes_its_record(name, tmp_path, monkeypatch):
    """It ends well, with figures."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    benchmark = name.partition(" ")[0]
    assert run(benchmark, RUNS[name].split()) == 0
    assert json.loads((tmp_path / f"{benchmark}.json").read_text())["figures"]


def test_the_help_names_each_benchmark_and_its_question(capsys, monkeypatch):
    """`python -m benchmarks --help` starts nothing."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert all(name in shown and each.question in shown for name, each in BENCHMARKS.items())


@pytest.mark.parametrize("name", [*BENCHMARKS, *TOOLS])
def test_without_a_gpu_or_a_peer_it_tells_its_options(name, capsys):
    """What it imports at once is there."""
    with pytest.raises(SystemExit, match="0"):
        run(name, ["--help"])
    assert "usage: " in capsys.readouterr().out
