"""On a GPU: `--decode-path resident` and `auto` have the bits of single steps, with drafts too."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.decode_loop import BatchKind as Launches
from legato_engine.kernels.megakernel.program import FIELDS, WORDS, CounterKind, counter
from legato_engine.runtime.autotune import ALL
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.graphs import Work

from benchmarks.decode.loops import Decodes, question, randomly, recorded
from benchmarks.speculation.drafting_paths import Answers, answer
from benchmarks.speculation.run import with_settings
from tests.gpu.inputs import HOPPER
from tests.loop_answers import Ask, results

pytestmark = [pytest.mark.gpu, HOPPER]


@pytest.fixture(scope="module")
def graph() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=32, crops_per_launch=0)
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module", params=["resident", "auto"])
def resident(graph: Assembly, request: pytest.FixtureRequest) -> Assembly:
    """`auto` takes the kernel where it measures it to be faster, if anywhere."""
    made = with_settings(graph, decode_path=request.param)
    assert request.param == "auto" or steps_of(made) is not None
    return made


def steps_of(assembly: Assembly) -> Any:
    loops = assembly.runner._loops
    assert loops is not None
    return loops._megakernel


def answers(assembly: Assembly, lengths: list[int], first: int = 0) -> tuple[list[list[int]], int]:
    sequences = [question(assembly, first + index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks], run.launches


def test_answers_have_the_bits_of_single_steps(graph: Assembly, resident: Assembly) -> None:
    """Greedy and sampled rows, alone, which is one launch, and among up to 31 others."""
    alone = []
    for index in range(32):
        (tokens,), launches = answers(resident, [60], first=index)
        assert launches == 1
        alone.append(tokens)
    plain, _ = answers(graph, [60] * 32)
    assert alone == plain
    for count in (2, 8, 13, 32):
        together, _ = answers(resident, [60] * count)
        assert together == plain[:count]


def test_lists_have_the_bits_of_single_steps(graph: Assembly, resident: Assembly) -> None:
    """Tokens, values and their certainties, together and among questions."""
    kinds = [kind for kind in range(80) if kind % 5 < 2]  # detections and points
    asked = [Ask(kind, 30, logprobs=False, after=0) for kind in kinds]
    mixed = [
        ask if index % 3 else Ask(5 + index, 30, False, index) for index, ask in enumerate(asked)
    ]
    for some in (asked[:1], asked, mixed):
        plain, _ = results(graph, some, 2)
        ours, _ = results(resident, some, 2)
        assert ours == plain


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_has_the_bits_of_single_steps(
    graph: Assembly, resident: Assembly, seed: int
) -> None:
    """Every skill, some with log-probabilities, with arrivals at any step."""
    draw = random.Random(seed)
    asked = [
        Ask(draw.randrange(8), draw.randint(2, 60), draw.random() < 0.3, draw.randint(0, 12))
        for _ in range(draw.randint(2, 40))
    ]
    plain, _ = results(graph, asked, 2)
    ours, _ = results(resident, asked, 2)
    assert ours == plain


@pytest.mark.parametrize(("skills", "num_steps"), [(False, 20_000), (True, 10_000)])
def test_short_steps_with_arrivals_and_aborts(
    resident: Assembly, monkeypatch: pytest.MonkeyPatch, skills: bool, num_steps: int
) -> None:
    """Nothing hangs, and every answer is what it is alone.

    By name all loops are launches of the kernel, but for those of more rows than it takes, or with
    a row that wants log-probabilities.
    """
    had, loops = steps_of(resident), resident.runner._loops
    assert loops is not None
    made = loops._loop

    def loop(slot: int, bucket: int, rank: int, needs: Needs) -> Work:
        few = bucket <= loops.megakernel_rows
        assert needs.logprobs or loops.choice is not ALL or not few, "a loop of captured steps"
        return made(slot, bucket, rank, needs)

    monkeypatch.setattr(loops, "_loop", loop)
    totals = randomly(resident, num_steps=num_steps, seed=11 + skills, skills=skills)
    assert totals["different"] == 0
    assert totals["aborted"] > num_steps / 100
    assert steps_of(resident) is had


@pytest.mark.parametrize("step", [0, 7])
def test_a_stuck_launch_loses_no_request(graph: Assembly, step: int) -> None:
    """Rows of a stuck launch continue in loops, and no token differs.

    They start after the last step that they have, if any. The last row joins while the launch is
    stuck.
    """
    assembly = with_settings(graph, decode_path="resident")
    asked = [Ask(5 + index, 50, logprobs=False, after=4 * index) for index in range(3)]
    expected, _ = results(graph, asked, 2)
    results(assembly, asked, 2)  # its counters are no longer those of a first launch
    build, sizes = steps_of(assembly).builds[0], steps_of(assembly).program.sizes
    # Worker 7's first instruction: in that step it waits for one head more than there are.
    words = dict(zip(FIELDS, build._table.view(-1, build.count, WORDS)[7, 0], strict=False))
    words["wait"].fill_(counter(sizes, CounterKind.BEST))
    words["wait_count"].fill_(1 - step - int(build._epoch[0]))
    words["wait_stride"].fill_(sizes.num_workers + 1)
    build.patience_ms = 50
    ours, _ = results(assembly, asked, 2)
    assert steps_of(assembly) is None
    assert ours == expected


SETTINGS = ("fixed:7", "seed", "budget")


@pytest.fixture(scope="module")
def plain() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(
            device="cuda", decode_path="resident", draft="lookup", max_running=4, crops_per_launch=0
        )
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module", params=SETTINGS)
def drafting(plain: Assembly, request: pytest.FixtureRequest) -> Assembly:
    made = with_settings(plain, speculation=request.param)
    assert set(drafting_steps_of(made).max_rows) == {Launches.DRAFTS, Launches.BOTH}
    return made


def drafting_steps_of(assembly: Assembly) -> Any:
    assert assembly.runner._loops is not None
    return assembly.runner._loops._megakernel


def drafted_answers(assembly: Assembly, lengths: list[int]) -> Answers:
    asked = [question(assembly, index, length) for index, length in enumerate(lengths)]
    return answer(assembly, asked, lengths)


def test_answers_are_those_without_speculation(plain: Assembly, drafting: Assembly) -> None:
    """Greedy and sampled rows, alone and together; a lone answer is one launch."""
    for lengths in ([200], [120, 200, 90]):
        wanted, ours = drafted_answers(plain, lengths), drafted_answers(drafting, lengths)
        assert ours.tokens == wanted.tokens
        assert ours.run.steps < wanted.run.steps
        assert sum(map(sum, ours.blocks)) > 0
        if len(lengths) == 1:
            assert ours.run.launches == 1


@pytest.mark.parametrize("kinds", [[0], [1, 0], [9, 0, 1]], ids=str)
def test_lists_are_those_without_speculation(
    plain: Assembly, drafting: Assembly, kinds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of objects and points, alone and beside an answer that drafts, by launches of the kernel."""
    asked = [Ask(kind, 40, logprobs=False, after=0) for kind in kinds]
    wanted, _ = results(plain, asked, depth=2)
    steps, with_values = drafting_steps_of(drafting), []
    run = steps.run

    def noted(*given: Any, payload: bool = False, **named: Any) -> None:
        with_values.append(payload)
        run(*given, payload=payload, **named)

    monkeypatch.setattr(steps, "run", noted)
    assert results(drafting, asked, depth=2)[0] == wanted
    assert True in with_values


@pytest.mark.parametrize("skills", [False, True])
def test_requests_come_and_go(drafting: Assembly, skills: bool) -> None:
    """Arrivals and aborts at any step hang nothing.

    Rows beyond those that the kernel takes run in loops.
    """
    totals = randomly(drafting, num_steps=3000, seed=7, skills=skills)
    assert totals["different"] == 0
    assert totals["aborted"] > 20
    assert drafting_steps_of(drafting) is not None


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize(
    "kind", [CounterKind.BEST, CounterKind.SETTLED], ids=lambda kind: kind.name
)
def test_a_stuck_launch_with_drafts_loses_no_request(
    plain: Assembly, kind: CounterKind, step: int
) -> None:
    """Rows of a stuck launch continue in loops after the last step that was read.

    Also when some row was settled in the step after it.
    """
    assembly = with_settings(plain, speculation="fixed:7")
    wanted = drafted_answers(plain, [60, 60])
    drafted_answers(assembly, [60, 60])
    steps = drafting_steps_of(assembly)
    build = next(each for each in steps.builds if each.tokens >= 16)
    # An instruction of one worker waits for one signal more than there is in that step.
    op = {CounterKind.BEST: 0, CounterKind.SETTLED: build.count - 2}[kind]
    of = 7 if kind is CounterKind.BEST else 0
    words = dict(zip(FIELDS, build._table.view(-1, build.count, WORDS)[of, op], strict=False))
    signals = steps.program.sizes.num_workers
    words["wait"].fill_(counter(steps.program.sizes, kind))
    words["wait_count"].fill_(1 - step - int(build._epoch[0]) + (signals if op else 0))
    words["wait_stride"].fill_(signals + 1)
    build.patience_ms = 50
    ours = drafted_answers(assembly, [60, 60])
    assert drafting_steps_of(assembly) is None
    assert ours.tokens == wanted.tokens


def test_another_draft_is_left_to_loops(plain: Assembly) -> None:
    """The model's own draft layer is no lookup."""
    config = msgspec.structs.replace(plain.config, draft="")
    other = with_settings(dataclasses.replace(plain, config=config), speculation="seed")
    assert other.runner.megakernel_rows == 0
    assert other.runner.decodes_by_loops
