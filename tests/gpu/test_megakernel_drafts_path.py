"""On a GPU: `--decode-path resident` with `--speculation` answers as it does without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble, with_speculation
from legato_engine.kernels.decode_loop import BatchKind as Launches
from legato_engine.kernels.megakernel.program import FIELDS, WORDS, CounterKind, counter

from benchmarks.decode.loops import question, randomly
from benchmarks.speculation.decode_paths import Answers, answer
from tests.gpu.inputs import HOPPER
from tests.loop_answers import Ask, results

pytestmark = HOPPER


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
    made = with_speculation(plain, request.param)
    assert set(steps_of(made).max_rows) == {Launches.DRAFTS, Launches.BOTH}
    return made


def steps_of(assembly: Assembly) -> Any:
    assert assembly.runner._loops is not None
    return assembly.runner._loops._megakernel


def answers(assembly: Assembly, lengths: list[int]) -> Answers:
    asked = [question(assembly, index, length) for index, length in enumerate(lengths)]
    return answer(assembly, asked, lengths)


def test_answers_are_those_without_speculation(plain: Assembly, drafting: Assembly) -> None:
    """Greedy and sampled rows, alone and together; a lone answer is one launch."""
    for lengths in ([200], [120, 200, 90]):
        wanted, ours = answers(plain, lengths), answers(drafting, lengths)
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
    steps, with_values = steps_of(drafting), []
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
    assert steps_of(drafting) is not None


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize(
    "kind", [CounterKind.BEST, CounterKind.SETTLED], ids=lambda kind: kind.name
)
def test_a_stuck_launch_loses_no_request(plain: Assembly, kind: CounterKind, step: int) -> None:
    """Rows of a stuck launch continue in loops after the last step that was read.

    Also when some row was settled in the step after it.
    """
    assembly = with_speculation(plain, "fixed:7")
    wanted = answers(plain, [60, 60])
    answers(assembly, [60, 60])
    steps = steps_of(assembly)
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
    ours = answers(assembly, [60, 60])
    assert steps_of(assembly) is None
    assert ours.tokens == wanted.tokens


def test_another_draft_is_left_to_loops(plain: Assembly) -> None:
    """The model's own draft layer is no lookup."""
    config = msgspec.structs.replace(plain.config, draft="")
    other = with_speculation(dataclasses.replace(plain, config=config), "seed")
    assert other.runner.megakernel_rows == 0
    assert other.runner.decodes_by_loops
