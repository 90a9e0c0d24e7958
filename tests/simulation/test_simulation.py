"""Random load and faults on the engine and its connections.

Every history is checked: one end, no token lost, doubled or changed, all resources given back.
`python -m tests.simulation.run` has more of them.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from legato_engine.core.engine_core import EngineCore

from tests.simulation.engine_host import NothingLeft, virtual_time
from tests.simulation.run import Totals, run, run_all

SEEDS = 10_000
PART = 250


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first else [])
        for first in range(0, SEEDS, PART)
    ],
)
def test_histories(first):
    totals = run_all(range(first, first + PART))
    assert totals.runs == PART
    assert totals.kills > PART / 4, "hardly an engine died"
    rare = {"stop", "length", "cancelled", "aborted"}
    rare |= {"QueueFull", "DeadlineExceeded", "PoisonedRequest"}
    assert rare <= set(totals.ends), f"these never happened: {rare - set(totals.ends)}"


def test_a_seed_repeats_its_history():
    assert run(11) == run(11)


def test_a_lost_token_is_found(monkeypatch):
    """The positive control: a resumed request that forgets its last token has another answer."""
    submit = EngineCore.submit

    def forgetful(self, request):
        resumed = request.resumed
        if resumed is not None and len(resumed.token_ids) > 1:
            import msgspec

            short = msgspec.structs.replace(
                resumed, token_ids=resumed.token_ids[:-1], payloads=resumed.payloads[:-1]
            )
            request = msgspec.structs.replace(request, resumed=short)
        submit(self, request)

    monkeypatch.setattr(EngineCore, "submit", forgetful)
    with pytest.raises(AssertionError) as caught:
        run_all(range(300))
    assert any("seed" in note for note in caught.value.__notes__)


def test_the_clock_jumps():
    """An hour takes no time of this machine."""
    start = time.process_time()
    with virtual_time() as loop:
        before = time.monotonic()
        loop.run_until_complete(asyncio.sleep(3600))
        assert time.monotonic() - before == pytest.approx(3600)
    assert time.process_time() - start < 60


def test_a_standstill_is_an_error():
    with virtual_time() as loop, pytest.raises(NothingLeft):
        loop.run_until_complete(asyncio.Event().wait())


def test_totals_add_up():
    both = Totals()
    both.join(run(1))
    both.join(run(2))
    assert both.runs == 2
    assert both.calls == sum(both.ends.values())
