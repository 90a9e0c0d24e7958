"""Faults inside the engine process, at named points, as callers see them."""

from __future__ import annotations

import pytest
from legato_engine import failpoints

from tests.e2e.scenes import long_stream
from tests.e2e.server import Server, until

QUICK = ("-m", "tests.e2e.quick_service")
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The text of a run without faults."""
    with Server(tmp_path_factory.mktemp("calm")) as server:
        return _text(server.inference.Generate(long_stream(NUM_TOKENS)))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("engine.forward=raise@50", marks=pytest.mark.slow),
        pytest.param("engine.sample=raise@50", marks=pytest.mark.slow),
        pytest.param("engine.plan=raise@60", marks=pytest.mark.slow),
        pytest.param("engine.launch=exit@50", marks=pytest.mark.slow),
        "engine.commit=kill@50",
    ],
)
def test_a_fault_at_any_point_of_a_step_changes_no_answer(tmp_path, expected, fault):
    """Every engine meets the fault again after as many steps, so that several die."""
    with Server(tmp_path, program=QUICK, environment={failpoints.VARIABLE: fault}) as server:
        responses = list(server.inference.Generate(long_stream(NUM_TOKENS)))
        assert _text(responses) == expected
        assert responses[-1].finished.info.resumptions >= 1
        assert server.events("engine_lost")


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_refused_as_unavailable(tmp_path):
    """It is tried again with growing delays, and the process gives up after some attempts."""
    fault = {failpoints.VARIABLE: "engine.startup=exit"}
    server = Server(tmp_path, environment=fault)
    with pytest.raises(AssertionError, match="engine_never_ready"):
        server.__enter__()
    assert server.process.wait() != 0
    until(lambda: server.events("engine_never_ready"))


def _text(responses):
    return "".join(each.text.text for each in responses)
