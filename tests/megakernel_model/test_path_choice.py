"""Decode paths: measured at start, kept, and chosen by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import torch
from legato_engine.config import LOOKUP_DRAFT, EngineConfig, max_block_size
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.decode_loop import BatchKind, Build, MegakernelOffer, MegakernelSteps
from legato_engine.kernels.megakernel.offer import PACKAGES, builds_for, code_files, code_hash
from legato_engine.kernels.proposer import LookupProposer
from legato_engine.runtime import calibration
from legato_engine.runtime import loops as decode_loop
from legato_engine.runtime.autotune import ALL, NONE, Kept, PathTable, StepTimes, measure
from legato_engine.runtime.backend import Needs, have_common_pages
from legato_engine.runtime.calibration import LoopTimes
from legato_engine.runtime.kv_pool import decode_buckets
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.runtime.torch_backend import TorchBackend
from legato_engine.speculation import BlockPolicy, block_policy

from tests.loop_answers import Ask, results
from tests.megakernel_model.test_resident_loops import Fake, Launches, answers

# ---------------------------------------------------------------- path table
# The table of decode paths: what it chooses, and what is kept of it.

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


# ---------------------------------------------------------------- path choice
# `--decode-path auto`: measured at start through the loops themselves, kept, and chosen by.

MOST = 4
LENGTHS = [40, 7, 2, 23]
Start = Callable[..., tuple[Assembly, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def graph() -> Iterator[Assembly]:
    """Single steps, and the model for the others."""
    made = assemble(
        EngineConfig(
            device="cpu", threads=1, model="random-tiny", random_weights=True, max_running=MOST
        )
    )
    yield made
    made.device.close()


@dataclasses.dataclass
class Kernel:
    """Fake megakernel, and the row counts at which its steps are reported as faster."""

    wins: Mapping[BatchKind, Collection[int]] = dataclasses.field(default_factory=dict)
    drawn: Mapping[BatchKind, Collection[int]] | None = None  # of drawn rows; None: the same
    common: Mapping[BatchKind, Collection[int]] | None = None  # with common pages; None: the same
    values: bool = True
    refused: str | None = None
    sources: str = "these"
    steps: int | None = None  # after the warm-up, until it is stuck
    fake: Fake | None = None
    built: list[tuple[Build, ...]] = dataclasses.field(default_factory=list)
    timed: list[tuple[BatchKind, int, bool, bool, bool]] = dataclasses.field(default_factory=list)
    took: list[float] = dataclasses.field(default_factory=list)

    def offer(self, max_rows: int, policy: BlockPolicy | None) -> MegakernelOffer | str:
        block = 0 if policy is None else policy.max_block
        builds = builds_for(max_rows, values=self.values, block=block)
        return self.refused or MegakernelOffer({"sources": self.sources}, builds, self._make)

    def _make(self, wanted: Collection[Build]) -> MegakernelSteps:
        self.built.append(tuple(wanted))
        kinds = {build.kind for build in wanted}
        self.fake = Fake(kinds)
        self.fake.drafts = any(kind.has_drafts for kind in kinds)
        return self.fake

    def seconds(
        self,
        kind: BatchKind,
        rows: int,
        drawn: bool,
        common: bool,
        in_megakernel: bool,
        took: float,
    ) -> float:
        self.timed.append((kind, rows, drawn, common, in_megakernel))
        self.took.append(took)
        wins = self.drawn if drawn and self.drawn is not None else self.wins
        wins = self.common if common and self.common is not None else wins
        return 1.0 if in_megakernel == (rows in wins.get(kind, ())) else 2.0


@pytest.fixture
def start(graph: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine, with one folder of kernels; returns it and what the log says of paths."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(decode_loop, "DraftLaunches", Launches)
    monkeypatch.setattr(calibration, "_STEPS", 3)  # many are for times alone
    timed = LoopTimes.seconds

    def run(kernel: Kernel, setting: str = "off") -> tuple[Assembly, list[dict[str, Any]]]:
        def offer_megakernel(
            backend: TorchBackend, max_rows: int, policy: BlockPolicy | None = None
        ) -> MegakernelOffer | str:
            del backend
            return kernel.offer(max_rows, policy)

        def seconds(
            times: LoopTimes,
            kind: BatchKind,
            num_rows: int,
            *,
            drawn: bool,
            common: bool,
            in_megakernel: bool,
        ) -> float:
            took = timed(
                times, kind, num_rows, drawn=drawn, common=common, in_megakernel=in_megakernel
            )
            return kernel.seconds(kind, num_rows, drawn, common, in_megakernel, took)

        monkeypatch.setattr(TorchBackend, "offer_megakernel", offer_megakernel)
        monkeypatch.setattr(LoopTimes, "seconds", seconds)
        policy = block_policy(setting)
        most = MOST * (1 + max_block_size(setting)) if policy else MOST
        with structlog.testing.capture_logs() as lines:
            runner = ModelRunner(
                graph.model,
                graph.device,
                graph.kv,
                max_running=MOST,
                buckets=decode_buckets(graph.device, most),
                proposer=None if policy is None else LookupProposer(),
                block_policy=policy,
                loops=True,
                megakernel=None,
            )
            if kernel.fake is not None:
                kernel.fake.bind(runner)
            runner.warm_up()
            if kernel.fake is not None:
                kernel.fake.left = kernel.steps
            runner.choose_paths()
        config = msgspec.structs.replace(graph.config, speculation=setting, draft=LOOKUP_DRAFT)
        said = [dict(line) for line in lines if line["event"] == "decode_paths"]
        return dataclasses.replace(graph, runner=runner, config=config), said

    return run


def test_a_first_start_measures_and_a_later_one_reads(start: Start, graph: Assembly) -> None:
    """It builds only what wins, and answers are the same."""
    expected = answers(graph, LENGTHS)
    first = Kernel({BatchKind.WORDS: [1, MOST], BatchKind.VALUES: []})
    assembly, said = start(first)
    assert first.built == [(Build(BatchKind.WORDS, MOST), Build(BatchKind.VALUES, MOST))]
    cells = {(kind is BatchKind.VALUES, rows, drawn) for kind, rows, drawn, _, _ in first.timed}
    shared = {(rows, common) for _, rows, _, common, _ in first.timed}
    assert shared == {(1, False), (MOST, False), (MOST, True)}
    assert cells == set(product((False, True), (1, MOST), (False, True)))
    assert first.fake is not None
    assert first.fake.kinds == cells
    assert min(first.took) > 0.0
    assert [line["measured"] for line in said] == ["now"]
    assert said[0]["milliseconds"][0] == {
        "kind": "values",
        "rows": 1,
        "drawn": False,
        "common": False,
        "resident": 2000.0,
        "loop": 1000.0,
    }
    assert answers(assembly, LENGTHS) == expected

    later = Kernel()
    again, said_again = start(later)
    assert later.built == [(Build(BatchKind.WORDS, MOST),)]
    assert later.timed == []
    assert [line["measured"] for line in said_again] == ["at an earlier start"]
    assert said_again[0]["milliseconds"] == said[0]["milliseconds"]
    assert again.runner.megakernel_rows == MOST
    assert answers(again, LENGTHS) == expected
    assert later.fake is not None
    assert later.fake.launches > 0


def test_more_rows_than_it_wins_with_are_loops(start: Start, graph: Assembly) -> None:
    """Where it wins with a lone row alone, it gets no other, in the first start and later."""
    for kernel in (Kernel({BatchKind.WORDS: [1]}), Kernel()):
        assembly, _ = start(kernel)
        fake = kernel.fake
        assert fake is not None
        fake.kinds.clear()
        assert assembly.runner.megakernel_rows == 1
        assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)
        assert fake.kinds == {(False, 1, False)}


@pytest.mark.parametrize(
    ("greedy", "drawn", "kinds"),
    [
        ([1, MOST], [], {(1, False), (2, False)}),
        ([1, MOST], [1], {(1, False), (2, False), (1, True)}),
        ([1], [MOST], {(1, False), (2, True), (3, True), (4, True)}),
    ],
)
def test_a_launch_with_a_drawn_row_goes_by_the_times_of_drawn_rows(
    start: Start, graph: Assembly, greedy: list[int], drawn: list[int], kinds: set[tuple[int, bool]]
) -> None:
    """Also where other rows of it are greedy; the same build serves both."""
    for kernel in (Kernel({BatchKind.WORDS: greedy}, {BatchKind.WORDS: drawn}), Kernel()):
        assembly, _ = start(kernel)
        fake = kernel.fake
        assert fake is not None
        fake.kinds.clear()
        for lengths in ([40, 7, 30, 20], [20, 40, 7, 30]):  # the first and third are greedy
            assert answers(assembly, lengths) == answers(graph, lengths)
        assert fake.kinds == {(False, *kind) for kind in kinds}
    assert kernel.built == [(Build(BatchKind.WORDS, MOST),)]


@pytest.mark.parametrize("shares", [False, True])
def test_launches_with_common_pages_go_by_their_own_times(
    start: Start, graph: Assembly, shares: bool
) -> None:
    """Lists about one image begin with its pages, questions with pages of their own."""
    everywhere = {BatchKind.WORDS: [1, MOST], BatchKind.VALUES: [1, MOST]}
    kernel = Kernel({}, common=everywhere)
    assembly, _ = start(kernel)
    fake = kernel.fake
    assert fake is not None
    fake.kinds.clear()
    asked = [Ask(4, 60, logprobs=False, after=6) for _ in range(3)]
    if shares:
        assert results(assembly, asked, 2)[0] == results(graph, asked, 2)[0]
    else:
        assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)
    assert bool(fake.kinds) == shares


@pytest.mark.parametrize(
    ("first", "common"),
    [([7], False), ([7, 7], True), ([7, 8], False), ([1, 1, 2, 2], True), ([1, 2, 2, 3], False)],
)
def test_rows_have_common_pages_if_most_begin_with_the_one_before(
    first: list[int], common: bool
) -> None:
    pages = [SimpleNamespace(ids=[page, 9]) for page in first]
    rows: Any = [SimpleNamespace(sequence=SimpleNamespace(pages=each)) for each in pages]
    assert have_common_pages(rows) == common


def test_where_it_wins_nowhere_nothing_is_built_later(start: Start, graph: Assembly) -> None:
    """And the first start keeps nothing of it."""
    first, later = Kernel(), Kernel()
    for kernel in (first, later):
        assembly, _ = start(kernel)
        assert assembly.runner.megakernel_rows == 0
        assert assembly.runner.decodes_by_loops
        assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)
    assert len(first.built) == 1
    assert later.built == []


@pytest.mark.parametrize("setting", ["fixed:3", "seed"])
def test_drafting_steps_are_measured_with_all_their_drafts(
    start: Start, graph: Assembly, setting: str
) -> None:
    """By the builds for rows that draft; the acceptance of what was measured is forgotten."""
    kernel = Kernel({BatchKind.DRAFTS: range(1, MOST + 1)})
    assembly, _ = start(kernel, setting)
    assert {(kind, common) for kind, _, _, common, _ in kernel.timed} == {
        (BatchKind.DRAFTS, False),
        (BatchKind.BOTH, False),
        (BatchKind.BOTH, True),
    }
    assert kernel.fake is not None
    assert {drawn for _, _, drawn in kernel.fake.kinds} == {False, True}
    drafts = assembly.runner._drafts
    assert drafts is not None
    fresh = drafts.overall.clone()
    drafts.forget()
    assert torch.equal(fresh, drafts.overall)
    kernel.fake.kinds.clear()
    assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)
    lone = LENGTHS[:1]  # 16 tokens are one row of `seed`
    assert answers(assembly, lone) == answers(graph, lone)
    assert kernel.fake.kinds != set()


def test_measuring_leaves_pages_and_constraints_as_they_were(start: Start, graph: Assembly) -> None:
    """It writes to the scratch page alone."""
    kept = [graph.kv.k_LNHSE[:, 1:].clone(), graph.kv.v_LNHSE[:, 1:].clone()]
    successor_C2 = graph.runner._resources.successor_C2
    assembly, _ = start(Kernel())
    assert torch.equal(assembly.kv.k_LNHSE[:, 1:], kept[0])
    assert torch.equal(assembly.kv.v_LNHSE[:, 1:], kept[1])
    assert torch.equal(assembly.runner._resources.successor_C2, successor_C2)
    assert not assembly.runner._resources.state.page_table_RM.any()


@pytest.mark.parametrize("drawn", [False, True])
def test_rules_of_sampling_are_of_the_measurement_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, drawn: bool
) -> None:
    """All measured rows have a temperature, or none; afterwards the state has its own again."""
    assembly, _ = start(Kernel())
    resources, loops = assembly.runner._resources, assembly.runner._loops
    assert loops is not None
    state, begin = resources.state, loops.start
    rules = (state.temperature_R, state.top_p_R, state.top_k_R, state.seed_R)
    for value, each in enumerate(rules, 3):
        each.fill_(value)
    before = [each.clone() for each in rules]
    needs: list[Needs] = []
    measured: list[torch.Tensor] = []

    def started(*given: Any) -> None:
        needs.extend(each for each in given if isinstance(each, Needs))
        resources.compute.submit(lambda: measured.extend(each.clone() for each in rules))
        begin(*given)

    monkeypatch.setattr(loops, "start", started)
    times = LoopTimes(resources, loops)
    with times.calibrating():
        times.seconds(BatchKind.WORDS, 2, drawn=drawn, common=False, in_megakernel=False)
    assert [each.sampled for each in needs] == [drawn]
    temperature_R, top_p_R, top_k_R, seed_R = (each[:2] for each in measured)
    assert temperature_R.tolist() == pytest.approx([0.7 if drawn else 0.0] * 2)
    assert top_p_R.tolist() == pytest.approx([0.9] * 2)
    assert (top_k_R.tolist(), seed_R.tolist()) == ([0, 0], [0, 1])
    assert all(map(torch.equal, rules, before))


def test_other_kernels_are_measured_again(start: Start) -> None:
    """What is kept is of their sources."""
    start(Kernel({BatchKind.WORDS: [1]}))
    other = Kernel({BatchKind.WORDS: [MOST]}, sources="those")
    start(other)
    assert other.timed != []
    assert len(other.built) == 1


def test_times_of_another_measurement_are_measured_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is also of how it was measured."""
    start(Kernel({BatchKind.WORDS: [1]}))
    monkeypatch.setattr("legato_engine.runtime.model_runner.own_hash", lambda: "another")
    again = Kernel({BatchKind.WORDS: [1]})
    start(again)
    assert again.timed != []


def test_without_memory_for_it_the_log_says_so_once(start: Start, graph: Assembly) -> None:
    """And all launches are loops."""
    kernel = Kernel(refused="needs memory for a second copy of the weights")
    assembly, said = start(kernel)
    assert [line["reason"] for line in said] == [f"the megakernel {kernel.refused}"]
    assert assembly.runner.megakernel_rows == 0
    assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)


@pytest.mark.parametrize("steps", [0, 2, 40])
def test_a_kernel_that_is_stuck_while_it_is_measured_is_not_chosen(
    start: Start, graph: Assembly, steps: int
) -> None:
    """Nor is anything kept: the next start measures again."""
    assembly, said = start(Kernel({BatchKind.WORDS: [1, MOST]}, steps=steps))
    assert said == []
    assert assembly.runner.megakernel_rows == 0
    assert answers(assembly, LENGTHS) == answers(graph, LENGTHS)
    later = Kernel({BatchKind.WORDS: [1, MOST]})
    start(later)
    assert later.timed != []
