"""The benchmark of pipelining."""

import dataclasses
import json

import pytest
from legato_engine import bench
from legato_engine.bench import Measurement, StepCost, compare, step_cost
from legato_engine.scheduler.launch import Launch, LaunchKind, Plan, Row
from legato_engine.scheduler.runner import LaunchTimes
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.timeline import Step

from tests.fakes import make_sequence

MS = 1_000_000


def step(index, *, rows=2, kind=LaunchKind.DECODE):
    """A step of 10 ms: forward 0-6, sampling 7-8, copy until 8.5, host work of 1 ms in all."""
    at = index * 10 * MS
    plan = Plan(kind, tuple(Row(make_sequence(i), 1) for i in range(rows)))
    record = StepRecord(
        launch=Launch(index, index % 2, plan),
        plan_start=at - MS,
        plan_end=at - MS // 2,
        launch_end=at - MS // 4,
        finalize_start=at,
        finalize_end=at + MS // 8,
        wait_start=at + MS,
        wait_end=at + 9 * MS,
        commit_end=at + 9 * MS + MS // 8,
    )
    times = LaunchTimes(
        forward_start=at,
        forward_end=at + 6 * MS,
        sample_start=at + 7 * MS,
        sample_end=at + 8 * MS,
        copy_end=at + 8 * MS + MS // 2,
    )
    return Step(record, times)


def test_step_cost():
    """Parts, period, idle and tick are read from consecutive full decode steps."""
    cost = step_cost([step(i) for i in range(5)], 2)
    assert cost == StepCost(forward=6.0, sampling=1.5, period=10.0, idle=3.0, tick=1.0, num_steps=4)


def test_only_full_decode_steps_count():
    """Prefills, partial batches and what neighbours them are left out."""
    steps = [step(0, kind=LaunchKind.PREFILL), step(1), step(2), step(3, rows=1), step(4)]
    assert step_cost(steps, 2).num_steps == 1
    with pytest.raises(ValueError, match="no two full steps"):
        step_cost([step(0), step(1, rows=1), step(2)], 2)


def test_compare():
    """The prediction is the ratio of the periods less the zombie tax."""
    blocking = StepCost(forward=4.0, sampling=0.5, period=6.0, idle=0.0, tick=0.2, num_steps=9)
    costs = {1: blocking, 2: dataclasses.replace(blocking, period=5.0)}
    measurement = Measurement(
        streams=4, length=100, num_tokens=800, costs=costs, seconds={1: 2.2, 2: 2.0}
    )
    row = compare(measurement, forward_single=3.0)
    assert row.predicted == pytest.approx(1.2 * (1 - 0.25 / 100))
    assert row.observed == pytest.approx(1.1)
    assert row.tokens_per_second[2] == pytest.approx(400.0)


@pytest.mark.parametrize("task", ["query", "caption"])
def test_command(capsys, task):
    """The command measures what was asked and prints it as JSON, or as two tables."""
    arguments = ["--model", "random-tiny", "--device", "cpu", "--threads", "1", "--task", task]
    arguments += ["--streams", "2", "--length", "12", "--rounds", "1", "--repeats", "1"]
    assert bench.main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    (row,) = figures["rows"]
    assert row["streams"] == 2
    assert min(row["pipelined"]["period"], row["pipelined"]["forward"], row["observed"]) > 0
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert "sampling ms" in printed
