"""The benchmark command, its workload and its prediction of a decode phase."""

import dataclasses
import json

import msgspec
import pytest
import structlog
from legato_engine.bench import command
from legato_engine.bench.options import KINDS
from legato_engine.bench.workload import (
    StepCost,
    Workload,
    compare,
    decode_phase,
    endless,
    measure,
    run,
    step_cost,
)
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Constraint
from legato_engine.telemetry import Timeline, step_feed
from legato_engine.types import DetectOutput, FinishReason
from structlog.testing import capture_logs

from tests.engine.test_telemetry import make_step

# ---------------------------------------------------------------- command

OPTIONS = ["--model", "random-tiny", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--length", "12", "--repeats", "1"]


def figures(capsys, *options):
    """Run the command; return its JSON."""
    with capture_logs():  # the process logs to stderr; these tests share one stdout with the log
        assert command.main([*OPTIONS, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("task", ["query", "caption", "detect"])
def test_json(capsys, task):
    """There is a row for each requested number of streams, with the figures of both depths."""
    (row,) = figures(capsys, "--task", task, "--streams", "2")["rows"]
    assert (row["task"], row["streams"], row["length"]) == (task, 2, 12)
    for depth in ("blocking", "pipelined"):
        assert min(row[depth]["period"], row[depth]["forward"], row[depth]["sampling"]) > 0
    assert set(row["tokens_per_second"]) == {"1", "2"}
    assert min(row["predicted"], row["observed"]) > 0


def test_context(capsys):
    """Steps are measured at the requested context."""
    (row,) = figures(capsys, "--streams", "1", "--context", "150")["rows"]
    assert row["context"] == 150


def test_compared_tasks_share_batch_and_context(capsys):
    """Detection and JSON are compared with text at one context, once per number of streams."""
    told = figures(capsys, "--streams", "1,2", "--compare-tasks")
    assert {(row["task"], row["streams"]) for row in told["rows"]} == {
        (task, streams) for task in ("query", "detect", "json") for streams in (1, 2)
    }
    assert len({row["context"] for row in told["rows"]}) == 1
    periods = {(row["task"], row["streams"]): row["pipelined"]["period"] for row in told["rows"]}
    assert [row["streams"] for row in told["detect_over_text"]] == [1, 2]
    for row in told["detect_over_text"]:
        for task in ("detect", "json"):
            ratio = periods[task, row["streams"]] / periods["query", row["streams"]]
            assert row[f"{task}_over_text"] == pytest.approx(ratio)


def test_log_lines_are_no_figures(capsys):
    """Standard output is JSON, whatever the engine logs."""
    configured = structlog.get_config()
    command.log_to_stderr()
    try:
        structlog.get_logger().info("pictures of a launch")
    finally:
        structlog.configure(**configured)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pictures of a launch" in printed.err


def test_tables(capsys):
    """Without --json the figures come as tables; Photon's two have its columns."""
    assert command.main([*OPTIONS, "--streams", "1,2", "--table", "photon"]) == 0
    printed = capsys.readouterr().out
    for words in ("forward (ms)", "sampling (ms)", "period (ms)", "blocking (ms)", "2 streams"):
        assert words in printed
    assert command.main([*OPTIONS, "--streams", "2", "--compare-tasks"]) == 0
    printed = capsys.readouterr().out
    for words in ("tick ms", "observed", "detect over text"):
        assert words in printed


def test_too_short(capsys):
    """Requests too short for two full steps are refused before a model is loaded."""
    with pytest.raises(SystemExit):
        command.main([*OPTIONS, "--length", "3"])
    assert "--length is at least" in capsys.readouterr().err


# ---------------------------------------------------------------- workload

LENGTH = 10


@pytest.fixture(scope="module")
def assembly():
    """One model for all tests."""
    made = assemble(EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=2))
    yield made
    made.device.close()


@pytest.mark.parametrize("context", [0, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_has_its_length_context_and_pages(assembly, kind, context):
    """All requests have exactly `length` tokens from `context` on, and share no page."""
    workload = Workload(assembly, kind=kind, count=5, length=LENGTH, context=context)
    timeline = Timeline(capacity=100)
    feed = step_feed(assembly.runner.times, (timeline.add,))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=2, observer=feed)
    sequences = workload.sequences()
    assert {sequence.length for sequence in sequences} == {workload.context}, "all of it is fed"
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.drain()
    assert [sequence.num_committed for sequence in sequences] == [LENGTH] * 5
    assert {sequence.prompt_length for sequence in sequences} == {workload.context}
    assert workload.context == context or not context
    assert [sequence.pages.cached_tokens for sequence in sequences] == [0] * 5


def test_every_detect_step_is_constrained(assembly):
    """Every step of a detection is constrained, and its list never ends."""
    (sequence,) = Workload(assembly, kind="detect", count=1, length=LENGTH).sequences()
    assert sequence.task.constrained
    assert sequence.task.has_payload
    first = assembly.frontend.constraints[sequence.task.constraint()]
    assert first.allowed is not None
    assert len(first.allowed) == 1
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=2)
    scheduler.submit(sequence)
    scheduler.drain()
    result = sequence.task.result(FinishReason.STOP)
    assert isinstance(result, DetectOutput)
    assert len(result.objects) == LENGTH // 3


def test_endless():
    """Only a constraint that another one narrows is replaced, by the widest that does."""
    table = (
        Constraint(),
        Constraint(allowed=(1,)),
        Constraint(allowed=(1, 2)),
        Constraint(allowed=(1, 2, 3)),
        Constraint(suppressed=(1,)),
        Constraint(allowed=(7,)),
    )
    assert endless(table) == (0, 1, 1, 2, 4, 5)


def test_a_context_too_short_is_refused(assembly):
    """A context shorter than the prompt is an error."""
    with pytest.raises(InvalidField, match="detect has a context of"):
        Workload(assembly, kind="detect", count=1, length=LENGTH, context=5)


# ---------------------------------------------------------------- decode phase
# Measurement and prediction of a decode phase.

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
def three_rows():
    """One model for all tests, with rows for three streams."""
    made = assemble(EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=3))
    yield made
    made.device.close()


def test_the_phase_has_only_decodes_even_if_prefills_may_be_shared(three_rows):
    """Every stream is prefilled first, in a launch of its own, whatever a server shares."""
    shared = assemble(msgspec.structs.replace(three_rows.config, max_prefill_rows=3))
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
def test_all_streams_start_and_end_together(three_rows, depth, kind):
    """A phase has one full batch per token after the first; depth 2 adds a step of zombies."""
    workload = Workload(three_rows, kind=kind, count=3, length=10)
    phase = decode_phase(run(three_rows, workload, depth), 3)
    assert len(phase) == 9 + (depth == 2)
    assert [step.record.zombies for step in phase] == [0] * 9 + [3] * (depth == 2)


def test_measure_counts_the_tokens_it_times(three_rows):
    """A measurement has both depths, the requested context, and the tokens in its time."""
    row = measure(
        three_rows,
        task="query",
        streams=2,
        length=8,
        context=60,
        repeats=2,
        forward_single=1.0,
    )
    assert row.context == 60
    assert (row.blocking.num_steps, row.pipelined.num_steps) == (12, 14)
    rates = row.tokens_per_second
    assert rates[2] / rates[1] == pytest.approx(row.observed), "of equally many tokens"
    assert min(rates.values()) > 0


def test_compare():
    """Prediction and observation are of one phase, whose zombies fill a step."""
    costs = {1: COST, 2: dataclasses.replace(COST, period=5.0)}
    row = compare(
        task="query",
        streams=4,
        length=102,
        context=30,
        costs=costs,
        # 100 blocking steps of 6 ms after the first commit, 101 pipelined ones of 5 ms.
        seconds={1: 0.600, 2: 0.505},
        forward_single=3.0,
    )
    assert row.predicted == pytest.approx(1.2 * (1 - 1 / 101))
    assert row.observed == pytest.approx(row.predicted)
    assert row.predicted_serving == pytest.approx(1.2 * (1 - 0.25 / 102))
    assert row.tokens_per_second[2] == pytest.approx(400 / 0.505)
