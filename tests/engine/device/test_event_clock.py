"""Times of a device whose clock drifts from the host's."""

import random

import pytest
from legato_engine.device.base import EventClock

SECOND = 1_000_000_000
STEP = 700_000  # nanoseconds
LAUNCH, WAKE = 8_000, 20_000  # from a record to an idle device's event; from an event to its sight


class Device:
    """Dates events by a clock that is wrong by `drift`, and tells how wrong their times are."""

    def __init__(self, drift: float) -> None:
        self.now = 0  # the true time
        self._rate = 1 + drift
        self._clock = EventClock(0)
        self._anchor = 0
        self._draw = random.Random(1)

    def launch(self, *, recorded: int, begun: int, ended: int, seen: int) -> tuple[int, int]:
        """Errors of the times of a launch's begin and end, in nanoseconds."""
        begin, end = (self._date(at, recorded) for at in (begun, ended))
        if self._clock.saw(end, seen):
            self._anchor = ended
        self.now = seen
        return begin - begun, end - ended

    def _date(self, at: int, recorded: int) -> int:
        return self._clock.date((at - self._anchor) * self._rate / 1e6, recorded)

    def decode(self, seconds: float) -> list[int]:
        """Steps back to back, each recorded while the one before runs; the host waits for them."""
        begun, stop, errors = self.now + LAUNCH, self.now + seconds * SECOND, list[int]()
        while self.now < stop:
            late = WAKE if self._draw.random() < 0.9 else 300_000
            ended = begun + STEP
            errors += self.launch(
                recorded=begun - STEP + 100_000, begun=begun, ended=ended, seen=ended + late
            )
            begun = ended
        return errors

    def requests(self, seconds: float, every: float, late: int) -> list[int]:
        """Launches of an idle device, which the host sees so late."""
        stop, errors = self.now + seconds * SECOND, list[int]()
        while self.now < stop:
            self.now += round(every * SECOND)
            begun = self.now + LAUNCH
            errors += self.launch(
                recorded=self.now, begun=begun, ended=begun + STEP, seen=begun + STEP + late
            )
        return errors


@pytest.mark.parametrize("drift", [0.0, 15e-6, -15e-6, 60e-6, -60e-6])
def test_times_stay_true_while_the_device_is_busy(drift: float) -> None:
    """After a minute of steps as after a second."""
    device = Device(drift)
    device.decode(3)
    errors = device.decode(60)
    most = WAKE + abs(drift) * 2 * SECOND + 1_000
    assert max(map(abs, errors)) < most


@pytest.mark.parametrize("drift", [15e-6, -15e-6])
@pytest.mark.parametrize(("every", "late"), [(0.5, WAKE), (0.005, WAKE), (0.005, 1_500_000)])
def test_times_of_an_idle_device_are_wrong_by_what_the_host_is_late(
    drift: float, every: float, late: int
) -> None:
    """No launch begins before it is recorded."""
    device = Device(drift)
    errors = device.requests(600, every, late)
    most = max(late, WAKE) + abs(drift) * 2 * SECOND + 1_000
    assert min(errors) >= -LAUNCH - abs(drift) * SECOND
    assert max(errors) <= most


def test_a_pause_leaves_no_launch_before_its_record() -> None:
    """Ten minutes drift by 9 ms; both times of the next launch are right at once."""
    device = Device(-15e-6)
    device.decode(5)
    errors = device.requests(1, every=600, late=WAKE)
    assert max(map(abs, errors)) <= LAUNCH + WAKE
    assert max(map(abs, device.decode(5))) < 100_000


def test_a_fast_clock_is_corrected_at_the_first_sight_after_a_pause() -> None:
    """The host sees its events before they are said to pass."""
    device = Device(15e-6)
    device.decode(5)
    device.requests(1, every=600, late=WAKE)
    assert max(map(abs, device.decode(5))) < 100_000


def test_without_corrections_times_would_drift() -> None:
    """The simulated clock is as wrong as it says."""
    clock = EventClock(0)
    minute = 60 * SECOND
    assert clock.date(minute * (1 + 15e-6) / 1e6, 0) - minute == pytest.approx(900_000)
