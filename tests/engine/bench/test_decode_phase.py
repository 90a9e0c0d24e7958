"""Measurement and prediction of a decode phase."""

import dataclasses

import msgspec
import pytest
from legato_engine.bench.workload import (
    Measurement,
    StepCost,
    Workload,
    compare,
    decode_phase,
    measure,
    run,
    step_cost,
)
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.scheduler.batch import LaunchKind

from tests.engine.telemetry.steps import make_step

PREFILL = LaunchKind.PREFILL
COST = StepCost(
    forward=4.0,
    sampling=0.5,
    period=6.0,
    idle=0.0,
    tick=0.2,
    wait=0.0,
    blocking_estimate=6.0,
    num_steps=9,
)


@pytest.fixture(scope="module")
def assembly():
    """One model for all tests, with rows for three streams."""
    made = assemble(EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=3))
    yield made
    made.device.close()


def test_the_phase_has_only_decodes_even_if_prefills_may_be_shared(assembly):
    """Every stream is prefilled first, in a launch of its own, whatever a server shares."""
    shared = assemble(msgspec.structs.replace(assembly.config, max_prefill_rows=3))
    workload = Workload(shared, kind="query", count=3, length=6, context=0)
    for depth in (1, 2):
        steps = run(shared, workload, depth)
        assert all(step.record.launch.plan.num_mixed_decodes == 0 for step in steps)
        kinds = [step.record.launch.plan.kind for step in steps]
        assert kinds[:3] == [PREFILL] * 3
        assert len(decode_phase(steps, 3)) == len(steps) - 3
    shared.device.close()


def test_step_cost():
    """Parts, period, idle and tick come from consecutive full decode steps."""
    assert step_cost([make_step(i) for i in range(5)], 2) == StepCost(
        forward=6.0,
        sampling=1.5,
        period=10.0,
        idle=3.0,
        tick=1.0,
        wait=8.0,
        blocking_estimate=9.875,
        num_steps=4,
    )


def test_only_full_decode_steps_count():
    """Prefills, partial batches, their neighbours and the seam of two runs are excluded."""
    steps = [make_step(0, kind=PREFILL), make_step(1), make_step(2), make_step(3, rows=1)]
    assert step_cost([*steps, make_step(4), make_step(1)], 2).num_steps == 1
    with pytest.raises(ValueError, match="no two full steps"):
        step_cost([make_step(0), make_step(1, rows=1), make_step(2)], 2)


def test_the_phase_begins_after_the_last_prefill():
    """A phase has only decode steps of all streams; otherwise it is refused."""
    steps = [make_step(0, kind=PREFILL), make_step(1, kind=PREFILL), make_step(2), make_step(3)]
    assert decode_phase(steps, 2) == steps[2:]
    for broken in (
        [steps[0], make_step(1, rows=1), steps[1], steps[2]],
        [*steps, make_step(4, rows=1)],
    ):
        with pytest.raises(ValueError, match="did not decode together"):
            decode_phase(broken, 2)


@pytest.mark.parametrize("kind", ["query", "detect"])
@pytest.mark.parametrize("depth", [1, 2])
def test_all_streams_start_and_end_together(assembly, depth, kind):
    """A phase has one full batch per token after the first; depth 2 adds a step of zombies."""
    workload = Workload(assembly, kind=kind, count=3, length=10)
    phase = decode_phase(run(assembly, workload, depth), 3)
    assert len(phase) == 9 + (depth == 2)
    assert [step.record.zombies for step in phase] == [0] * 9 + [3] * (depth == 2)


def test_measure_counts_the_tokens_it_times(assembly):
    """A measurement has both depths, the requested context, and the tokens in its time."""
    measured = measure(assembly, task="query", streams=2, length=8, context=60, repeats=2)
    assert (measured.context, measured.num_tokens) == (60, 2 * 6)
    assert {depth: cost.num_steps for depth, cost in measured.costs.items()} == {1: 12, 2: 14}
    assert min(measured.seconds.values()) > 0


def test_compare():
    """Prediction and observation are of one phase, whose zombies fill a step."""
    costs = {1: COST, 2: dataclasses.replace(COST, period=5.0)}
    measurement = Measurement(
        task="query",
        streams=4,
        length=102,
        context=30,
        costs=costs,
        # 100 blocking steps of 6 ms after the first commit, 101 pipelined ones of 5 ms.
        seconds={1: 0.600, 2: 0.505},
    )
    row = compare(measurement, forward_single=3.0)
    assert row.predicted == pytest.approx(1.2 * (1 - 1 / 101))
    assert row.observed == pytest.approx(row.predicted)
    assert row.predicted_serving == pytest.approx(1.2 * (1 - 0.25 / 102))
    assert row.tokens_per_second[2] == pytest.approx(400 / 0.505)
