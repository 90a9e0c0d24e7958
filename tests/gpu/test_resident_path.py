"""On a GPU: `--decode-path resident` answers as the resident kernel does, whoever else is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.loading import assemble, with_decode_path
from legato_engine.resident.program import FIELDS, WORDS, Kind, counter
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.graph_runner import Work

from benchmarks.loops import (
    Decodes,
    picture,
    question,
    randomly,
    recorded,
    skilled,
    values_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]


@pytest.fixture(scope="module")
def graph() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=32, crops_per_launch=0)
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module")
def resident(graph: Assembly) -> Assembly:
    made = with_decode_path(graph, "resident")
    assert steps_of(made) is not None
    return made


def steps_of(assembly: Assembly) -> Any:
    loops = assembly.runner._loops
    assert loops is not None
    return loops._resident


def answers(assembly: Assembly, lengths: list[int], first: int = 0) -> tuple[list[list[int]], int]:
    sequences = [question(assembly, first + index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks], run.launches


def test_an_answer_is_one_launch_and_the_same_in_every_batch(resident: Assembly) -> None:
    """Greedy and sampled rows, alone and among up to 31 others."""
    alone = []
    for index in range(32):
        (tokens,), launches = answers(resident, [60], first=index)
        assert launches == 1
        alone.append(tokens)
    for count in (2, 8, 13, 32):
        together, _ = answers(resident, [60] * count)
        assert together == alone[:count]


def test_greedy_answers_part_from_the_graphs_at_near_ties_alone(
    graph: Assembly, resident: Assembly
) -> None:
    """Sums run in another order. Where two answers first differ, the graph's logits of both tokens
    differ by what bf16 rounds.
    """
    for index in range(0, 32, 2):
        (plain,), (ours,) = (answers(path, [40], first=index)[0] for path in (graph, resident))
        parted = next((i for i in range(40) if plain[i] != ours[i]), None)
        if parted is not None:
            answers(graph, [parted + 1], first=index)
            gaps = [
                float(slot.logits_RV[0, plain[parted]] - slot.logits_RV[0, ours[parted]])
                for slot in graph.runner._slots  # the last launch's is one of them
            ]
            assert any(0 <= gap < 0.25 for gap in gaps), (index, parted, gaps)


def test_short_steps_with_arrivals_and_aborts(resident: Assembly) -> None:
    """20,000 of them: no hang, and every answer is what it is alone."""
    totals = randomly(resident, num_steps=20_000, seed=11, skills=False)
    assert totals["different"] == 0
    assert totals["aborted"] > 200
    assert steps_of(resident) is not None


def test_short_steps_of_every_skill(resident: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with their values and text, in launches of the kernel, but for those with a row that
    wants log-probabilities: each answer is what it is alone.
    """
    loops = resident.runner._loops
    assert loops is not None
    made = loops._loop

    def loop(slot: int, bucket: int, rank: int, needs: Needs) -> Work:
        assert needs.logprobs, "a loop of captured steps"
        return made(slot, bucket, rank, needs)

    monkeypatch.setattr(loops, "_loop", loop)
    totals = randomly(resident, num_steps=10_000, seed=12)
    assert totals["different"] == 0
    assert totals["aborted"] > 100
    assert steps_of(resident) is not None


def lists(assembly: Assembly, kinds: list[int]) -> list[list[tuple[Any, ...]]]:
    """What each detection or list of points has."""
    image = picture(assembly)
    sequences = [skilled(assembly, image, kind, 30) for kind in kinds]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(kinds))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [values_of(*each) for each in zip(sequences, tasks, strict=True)]


def test_lists_part_from_captured_steps_where_the_model_is_in_doubt(
    graph: Assembly, resident: Assembly
) -> None:
    """Sums run in another order. Where two lists first differ, either the graph's probabilities of
    a list's end and of its going on are near each other, or values are near, or its values spread
    over many bins; up to there certainties are the same but for rounding.
    """
    kinds = [kind for kind in range(100) if kind % 5 < 2]  # detections and points
    num_same = 0
    for plain, ours in zip(lists(graph, kinds), lists(resident, kinds), strict=True):
        both = list(zip(plain, ours, strict=False))
        parted = next((i for i, (one, two) in enumerate(both) if one[:2] != two[:2]), None)
        for one, two in both[:parted]:
            assert one[2] == pytest.approx(two[2], abs=0.06)
        if parted is None:
            num_same += 1
            assert len(plain) == len(ours)
            continue
        (token, payload, certainty), (other, value, others) = both[parted]
        if token != other:  # the end has a certainty of one
            assert min(certainty[0], others[0]) == pytest.approx(0.5, abs=0.15)
        elif certainty[1] > 0.9:
            assert payload == pytest.approx(value, abs=1 / 16)
    assert num_same > len(kinds) / 4


@pytest.mark.parametrize("step", [0, 7])
def test_a_stuck_launch_loses_no_request(graph: Assembly, step: int) -> None:
    """Its rows go on with loops after the last step that they have, if any."""
    assembly = with_decode_path(graph, "resident")
    expected, _ = answers(assembly, [50, 50, 50])
    build, sizes = steps_of(assembly).builds[0], steps_of(assembly).program.sizes
    # Worker 7's first instruction: in that step it waits for one head more than there are.
    words = dict(zip(FIELDS, build._table.view(-1, build.count, WORDS)[7, 0], strict=False))
    words["wait"].fill_(counter(sizes, Kind.BEST))
    words["wait_count"].fill_(1 - step - int(build._epoch[0]))
    words["wait_stride"].fill_(sizes.num_workers + 1)
    build.patience_ms = 50
    ours, _ = answers(assembly, [50, 50, 50])
    assert steps_of(assembly) is None
    assert [len(tokens) for tokens in ours] == [50, 50, 50]
    assert [tokens[: step + 1] for tokens in ours] == [tokens[: step + 1] for tokens in expected]
