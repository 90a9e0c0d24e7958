"""The table of decode paths: what it chooses, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from legato_engine.kernels.cuda.resident_decoder import builds_for
from legato_engine.kernels.cuda.resident_subject import PACKAGES, code_files, code_hash
from legato_engine.kernels.resident_builds import Build, Kind
from legato_engine.runtime.path_table import ALL, NONE, Kept, PathTable, StepTimes, measure

WORDS, VALUES, DRAFTS = Kind
SUBJECT = {"gpu": "a GPU", "sources": "abc"}


def table(**wins: tuple[int, ...]) -> PathTable:
    """Where the kernel wins at these counts of rows, of 1, 8, 16 and 32."""
    return PathTable(
        StepTimes(kind, rows, 1.0 + (rows not in wins.get(kind, ())), 1.5)
        for kind in (WORDS, VALUES)
        for rows in (32, 16, 8, 1)
    )


@pytest.mark.parametrize(
    ("max_rows", "block", "values", "rows"),
    [
        (32, 0, True, [8, 16, 32]),
        (100, 0, False, [8, 16, 32]),
        (16, 0, True, [8, 16]),
        (6, 0, True, [6]),
        (9, 0, False, [8, 9]),
        (16, 3, True, [2, 4, 8]),
        (3, 3, True, [2, 3]),
        (16, 16, True, [1]),
    ],
)
def test_builds_are_for_as_many_rows_as_a_launch_may_have(
    max_rows: int, block: int, values: bool, rows: list[int]
) -> None:
    """With draft tokens, all that these rows may have."""
    kinds = [DRAFTS] if block else [WORDS, VALUES][: 1 + values]
    assert list(builds_for(max_rows, values=values, block=block)) == [
        Build(kind, most) for kind in kinds for most in rows
    ]


def test_rows_between_measured_counts_go_with_the_next_larger() -> None:
    """More than were measured are loops."""
    by_times = table(words=(1, 16))
    taken = [rows for rows in range(1, 40) if by_times.takes(WORDS, rows)]
    assert taken == [1, *range(9, 17)]
    assert not any(by_times.takes(VALUES, rows) for rows in range(1, 40))
    assert not by_times.takes(DRAFTS, 1)


def test_only_builds_that_win_are_wanted() -> None:
    """A lone row needs the build of eight."""
    builds = builds_for(32, values=True)
    assert table().wanted(builds) == ()
    assert table(words=(1,)).wanted(builds) == (Build(WORDS, 8),)
    assert table(words=(16,), values=(1, 8, 32)).wanted(builds) == (
        Build(WORDS, 16),
        Build(VALUES, 8),
        Build(VALUES, 32),
    )


def test_both_paths_are_measured_in_turns_and_the_shortest_counts() -> None:
    """A lone row too, by the smallest build, unless that is for one."""
    calls: list[tuple[Kind, int, bool]] = []

    def seconds(kind: Kind, rows: int, resident: bool) -> float:
        calls.append((kind, rows, resident))
        disturbed = 5.0 if len(calls) % 6 == 1 else 0.0
        return disturbed + rows + (0.5 if resident == (rows > 1) else 0.0)

    measured = measure([Build(WORDS, 8), Build(WORDS, 16), Build(VALUES, 1)], seconds)
    assert [(each.kind, each.rows) for each in measured.times] == [
        (VALUES, 1),
        (WORDS, 1),
        (WORDS, 8),
        (WORDS, 16),
    ]
    assert [(each.resident, each.loop) for each in measured.times] == [
        (1.0, 1.5),
        (1.0, 1.5),
        (8.5, 8.0),
        (16.5, 16.0),
    ]
    assert [resident for _, _, resident in calls] == [True, False] * (len(calls) // 2)


def test_a_named_path_is_always_that() -> None:
    assert ALL.takes(WORDS, 1)
    assert not NONE.takes(WORDS, 1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """In a folder that does not exist yet."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path / "kernels"))
    return Kept(SUBJECT)


def test_a_kept_table_is_read_again(kept: Kept) -> None:
    """Whole, and of its own subject alone."""
    assert kept.read() is None
    written = table(words=(1, 8))
    kept.write(written)
    again = Kept(dict(reversed(SUBJECT.items()))).read()
    assert again is not None
    assert again.times == written.times
    assert Kept({**SUBJECT, "sources": "abd"}).read() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"subject": {"gpu": "a GPU", "sources": "abc"}}',
        '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": []}',
        '{"subject": {"gpu": "another", "sources": "abc"}, "times": [GOOD]}',
        '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": [{"kind": "words"}]}',
        '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": [BAD]}',
        "\xff",
    ],
)
def test_a_file_that_is_no_table_of_the_subject_is_not_read(kept: Kept, text: str) -> None:
    """It is measured again."""
    good = '{"kind": "words", "rows": 1, "resident": 0.1, "loop": 0.2}'
    kept.path().parent.mkdir()
    text = text.replace("GOOD", good).replace("BAD", good.replace("0.1", "-0.1"))
    kept.path().write_bytes(text.encode("latin-1"))
    assert kept.read() is None
    right = '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": [GOOD]}'
    kept.path().write_text(right.replace("GOOD", good))
    assert kept.read() is not None


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start measures again."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path / "file"))
    kept = Kept(SUBJECT)
    kept.write(table(words=(1,)))
    assert kept.read() is None


def test_the_code_of_all_kernels_is_of_the_subject() -> None:
    """Sources, launches and the resident kernel's program; nothing that a start writes."""
    names = {file.name for package in PACKAGES for file in code_files(package)}
    assert {"step.cu", "sample.cu", "common.cuh", "program.py", "decoder.py"} <= names
    assert {Path(name).suffix for name in names} == {".py", ".cu", ".cuh"}
    assert code_hash() == code_hash()
