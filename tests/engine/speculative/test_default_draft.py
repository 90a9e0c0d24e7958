"""The draft that comes with the default model: found by itself, and worth its steps."""

import dataclasses

import msgspec
import pytest
from legato_engine.config import LOOKUP_DRAFT, EngineConfig
from legato_engine.core.assembly import assemble, with_speculation

from benchmarks.speculation.run import Run
from benchmarks.speculation.workloads import real_requests, sample_images


@pytest.fixture(scope="module")
def assembly():
    """The default model."""
    made = assemble(EngineConfig(device="cpu", threads=1, max_running=4))
    yield made
    made.device.close()


def asked(assembly, temperature=0.0):
    """Captions of one picture and questions about it, together."""
    requests = real_requests(assembly, sample_images(assembly)[1:2])
    for request in requests:
        request.task.sampling = msgspec.structs.replace(
            request.task.sampling, temperature=temperature
        )
    return Run(assembly, requests)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_it_says_what_the_model_will(assembly, temperature):
    """Answers are the same, greedy and sampled, and come in far fewer steps than by lookup."""
    plain = asked(assembly, temperature)
    by_draft = asked(with_speculation(assembly, "fixed:4"), temperature)
    config = msgspec.structs.replace(assembly.config, draft=LOOKUP_DRAFT)
    lookup = asked(
        with_speculation(dataclasses.replace(assembly, config=config), "fixed:4"), temperature
    )
    drafted, found = (run.figures("", 4, "", plain) for run in (by_draft, lookup))
    assert drafted.identical
    assert found.identical
    assert drafted.tokens_per_verify > (2.0 if temperature == 0.0 else 1.5)
    assert drafted.tokens_per_verify > found.tokens_per_verify + 0.4


def test_with_random_weights_there_is_none():
    """It was taught by other weights."""
    config = EngineConfig(device="cpu", threads=1, random_weights=True, max_running=1)
    made = assemble(config)
    made.device.close()
    assert made.draft is None
