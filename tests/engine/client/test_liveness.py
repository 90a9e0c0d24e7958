"""Signs of life are missed only while this process could have seen them."""

import pytest
from legato_engine.client import monitor
from legato_engine.client.monitor import TICK, Liveness
from legato_engine.ipc.messages import Heartbeat, Load


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(monitor, "time", made)
    return made


def beat(step=0, **load):
    """A heartbeat."""
    return Heartbeat(step=step, load=Load(**load), estimated_wait=0.0)


def test_silence_grows_until_a_heartbeat(clock):
    """By the time between two ticks."""
    seen = Liveness()
    for _ in range(10):
        clock.now += TICK
        seen.tick()
    assert seen.silent == pytest.approx(10 * TICK)
    seen.record_heartbeat(beat())
    assert seen.silent == 0


def test_a_pause_of_this_process_is_no_silence(clock):
    """However long it was stopped, one gap counts as two ticks."""
    seen = Liveness()
    clock.now += 90
    seen.tick()
    assert seen.silent == seen.unmoved == pytest.approx(2 * TICK)


def test_an_engine_with_work_must_step(clock):
    """Without one it counts as unmoved, heartbeats or not; an idle one may rest."""
    seen = Liveness()
    for _ in range(10):
        clock.now += TICK
        seen.tick()
        seen.record_heartbeat(beat(step=1, waiting=1))
    assert seen.silent == 0
    assert seen.unmoved == pytest.approx(9 * TICK)
    seen.record_heartbeat(beat(step=2, waiting=1))
    assert seen.unmoved == 0
    clock.now += TICK
    seen.tick()
    seen.record_heartbeat(beat(step=2))
    assert seen.unmoved == 0
