"""The table of decode paths: what it chooses, and what is kept of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from legato_engine.kernels.decode_loop import BatchKind, Build
from legato_engine.kernels.megakernel.offer import PACKAGES, builds_for, code_files, code_hash
from legato_engine.runtime.autotune import ALL, NONE, Kept, PathTable, StepTimes, measure

WORDS, VALUES, DRAFTS, BOTH = BatchKind
SUBJECT = {"gpu": "a GPU", "sources": "abc"}


def table(
    drawn: tuple[int, ...] = (), common: tuple[int, ...] = (), **wins: tuple[int, ...]
) -> PathTable:
    """Make a table in which the kernel wins at these row counts, of 1, 8 and 16.

    `wins`: of greedy rows by kind; `drawn`: of drawn rows of words, both with pages of their own;
    `common`: of rows with common pages, greedy and drawn.
    """
    return PathTable(
        StepTimes(kind, rows, is_drawn, shares, 1.0 + (rows not in won), 1.5)
        for kind in (WORDS, VALUES)
        for is_drawn in (True, False)
        for shares in (True, False)
        for own in [drawn * (kind is WORDS) if is_drawn else wins.get(kind, ())]
        for won in [common if shares else own]
        for rows in (16, 8, 1)
        if rows > 1 or not shares
    )


def taken(
    by_times: PathTable, kind: BatchKind, *, drawn: bool = False, common: bool = False
) -> list[int]:
    counts = range(1, 40)
    return [rows for rows in counts if by_times.takes(kind, rows, drawn=drawn, common=common)]


@pytest.mark.parametrize(
    ("max_rows", "block", "values", "rows"),
    [
        (32, 0, True, [8, 16]),
        (100, 0, False, [8, 16]),
        (16, 0, True, [8, 16]),
        (6, 0, True, [6]),
        (9, 0, False, [8, 9]),
        (16, 3, True, [2]),
        (16, 7, True, [1, 2]),
        (1, 3, True, [1]),
        (16, 15, True, [1]),
        (16, 16, True, []),
    ],
)
def test_builds_are_for_as_many_rows_as_a_launch_may_have(
    max_rows: int, block: int, values: bool, rows: list[int]
) -> None:
    """At most 16 without draft tokens; with them two, with all that these rows may have."""
    kinds = [DRAFTS] if block else [WORDS, VALUES][: 1 + values]
    builds = [
        each for each in builds_for(max_rows, values=values, block=block) if each.kind is not BOTH
    ]
    assert builds == [Build(kind, most) for kind in kinds for most in rows]


@pytest.mark.parametrize(
    ("max_rows", "block", "tokens"),
    [(16, 3, [8, 16]), (3, 3, [8, 9]), (2, 7, [8, 9]), (1, 7, [1]), (5, 7, [8, 16])],
)
def test_builds_with_both_are_for_as_many_tokens_as_a_launch_may_have(
    max_rows: int, block: int, tokens: list[int]
) -> None:
    """Of which one row has values, and no draft tokens."""
    builds = builds_for(max_rows, values=True, block=block)
    assert [each.rows for each in builds if each.kind is BOTH] == tokens
    assert BOTH not in {each.kind for each in builds_for(max_rows, values=False, block=block)}


def test_rows_between_measured_counts_go_with_the_next_larger() -> None:
    """More than were measured are loops."""
    by_times = table(words=(1, 16))
    assert taken(by_times, WORDS, drawn=False) == [1, *range(9, 17)]
    assert taken(by_times, VALUES, drawn=False) == []
    assert taken(by_times, DRAFTS, drawn=False) == []


def test_launches_with_a_drawn_row_go_by_what_drawn_rows_take() -> None:
    """And greedy ones by theirs."""
    everywhere = (1, 8, 16)
    nowhere = table(words=everywhere)
    assert taken(nowhere, WORDS, drawn=False) == list(range(1, 17))
    assert taken(nowhere, WORDS, drawn=True) == []
    lone = table(words=everywhere, drawn=(1,))
    assert taken(lone, WORDS, drawn=True) == [1]
    assert taken(table(drawn=(8,)), WORDS, drawn=True) == list(range(2, 9))
    assert taken(table(drawn=(8,)), WORDS, drawn=False) == []


def test_launches_with_common_pages_go_by_what_such_rows_take() -> None:
    """A lone row has none, and rows that draft do not share."""
    by_times = table(words=(1,), common=(8,))
    assert taken(by_times, WORDS) == [1]
    assert taken(by_times, WORDS, common=True) == list(range(1, 9))
    assert taken(by_times, VALUES, common=True) == list(range(2, 9))
    assert taken(by_times, WORDS, drawn=True, common=True) == list(range(2, 9))
    drafting = PathTable([StepTimes(DRAFTS, 4, False, False, 1.0, 1.5)])
    assert taken(drafting, DRAFTS, common=True) == [1, 2, 3, 4]


def test_only_builds_that_win_are_wanted() -> None:
    """A lone row needs the build of eight; drawn rows need the builds of greedy ones."""
    builds = builds_for(32, values=True)
    assert table().wanted(builds) == ()
    assert table(words=(1,)).wanted(builds) == (Build(WORDS, 8),)
    assert table(words=(16,), values=(1, 16)).wanted(builds) == (
        Build(WORDS, 16),
        Build(VALUES, 8),
        Build(VALUES, 16),
    )
    assert table(drawn=(1,)).wanted(builds) == (Build(WORDS, 8),)
    assert table(common=(16,)).wanted(builds) == (Build(WORDS, 16), Build(VALUES, 16))
    assert table(words=(8,), drawn=(16,)).wanted(builds) == (Build(WORDS, 8), Build(WORDS, 16))


def test_both_paths_are_measured_in_turns_and_the_shortest_counts() -> None:
    """Both paths are measured in turns, a lone row by the smallest build unless that is for one.

    All are greedy, then drawn, with pages of their own and then with common ones, which a lone row
    has not.
    """
    calls: list[bool] = []

    def seconds(
        kind: BatchKind, num_rows: int, *, drawn: bool, common: bool, in_megakernel: bool
    ) -> float:
        del kind
        calls.append(in_megakernel)
        disturbed = 5.0 if len(calls) % 6 == 1 else 0.0
        slower = 0.5 if in_megakernel == (num_rows > 1) else 0.0
        less = 0.125 if common and in_megakernel else 0.0
        return disturbed + num_rows + slower + (0.25 if drawn and in_megakernel else 0.0) - less

    measured = measure([Build(WORDS, 8), Build(WORDS, 16), Build(VALUES, 1)], seconds)
    assert measured.times == (
        StepTimes(VALUES, 1, False, False, 1.0, 1.5),
        StepTimes(VALUES, 1, True, False, 1.25, 1.5),
        StepTimes(WORDS, 1, False, False, 1.0, 1.5),
        StepTimes(WORDS, 1, True, False, 1.25, 1.5),
        StepTimes(WORDS, 8, False, False, 8.5, 8.0),
        StepTimes(WORDS, 8, False, True, 8.375, 8.0),
        StepTimes(WORDS, 8, True, False, 8.75, 8.0),
        StepTimes(WORDS, 8, True, True, 8.625, 8.0),
        StepTimes(WORDS, 16, False, False, 16.5, 16.0),
        StepTimes(WORDS, 16, False, True, 16.375, 16.0),
        StepTimes(WORDS, 16, True, False, 16.75, 16.0),
        StepTimes(WORDS, 16, True, True, 16.625, 16.0),
    )
    assert calls == [True, False] * (len(calls) // 2)


def test_a_named_path_is_always_that() -> None:
    for drawn, common in product((False, True), repeat=2):
        assert ALL.takes(WORDS, 1, drawn=drawn, common=common)
        assert not NONE.takes(WORDS, 1, drawn=drawn, common=common)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Return a file of times in a folder that does not exist yet."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path / "kernels"))
    return Kept(SUBJECT)


def test_a_kept_table_is_read_again(kept: Kept) -> None:
    """Whole, and of its own subject alone."""
    assert kept.read() is None
    written = table(words=(1, 8), drawn=(8,))
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
        '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": [GREEDY]}',
        '{"subject": {"gpu": "a GPU", "sources": "abc"}, "times": [OWN]}',
        "\xff",
    ],
)
def test_a_file_that_is_no_table_of_the_subject_is_not_read(kept: Kept, text: str) -> None:
    """It is measured again, also if it does not say which rows were drawn or shared pages."""
    good = (
        '{"kind": "words", "rows": 1, "drawn": false, "common": false,'
        ' "resident": 0.1, "loop": 0.2}'
    )
    text = text.replace("OWN", good.replace(' "common": false,', ""))
    greedy = good.replace('"drawn": false, ', "")
    kept.path().parent.mkdir()
    text = text.replace("GOOD", good).replace("BAD", good.replace("0.1", "-0.1"))
    text = text.replace("GREEDY", greedy)
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
    """Sources, launches and the megakernel's program; nothing that a start writes."""
    names = {file.name for package in PACKAGES for file in code_files(package)}
    assert {"step.cu", "sample.cu", "common.cuh", "program.py", "decoder.py"} <= names
    assert {Path(name).suffix for name in names} == {".py", ".cu", ".cuh"}
    assert code_hash() == code_hash()
