"""Requests of fixed length."""

import pytest
from legato_engine.bench.options import KINDS
from legato_engine.bench.workload import Workload, endless
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Constraint
from legato_engine.telemetry import StepFeed, Timeline
from legato_engine.types import DetectResult, FinishReason

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
    feed = StepFeed(assembly.runner.times, (timeline.add,))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=2, observer=feed.committed)
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
    assert isinstance(result, DetectResult)
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
