"""Devices: the CPU's streams, the host's memory and the clock of events."""

from __future__ import annotations

import functools
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from legato_engine.device import cuda
from legato_engine.device.base import EventClock
from legato_engine.device.cpu import CpuDevice
from legato_engine.device.host import available_memory, return_freed_memory
from legato_engine.device.select import open_device
from legato_engine.errors import InvalidField

# ---------------------------------------------------------------- cpu
# The CPU's streams are real: ordered, concurrent, and honest about failures.


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A device of one thread, closed after the test."""
    opened = CpuDevice(num_threads=1)
    yield opened
    opened.close()


def test_a_stream_keeps_its_order(device: CpuDevice) -> None:
    """Work runs in the order it was submitted, and an event fires after what precedes it."""
    seen: list[int] = []
    for index in range(100):
        device.compute.submit(functools.partial(seen.append, index))
    device.compute.record().wait()
    assert seen == list(range(100))


def test_submit_does_not_wait(device: CpuDevice) -> None:
    """Submitting returns while the work is still blocked, and its event is not passed yet."""
    gate = threading.Event()
    device.compute.submit(lambda: (gate.wait(), None)[1])
    event = device.compute.record()
    assert not event.query()
    gate.set()
    event.wait()
    assert event.query()


def test_streams_run_side_by_side(device: CpuDevice) -> None:
    """The copy stream makes progress while the compute stream is blocked."""
    gate = threading.Event()
    device.compute.submit(lambda: (gate.wait(), None)[1])
    device.copy.submit(lambda: None)
    device.copy.record().wait()
    gate.set()


def test_a_stream_waits_for_another_streams_event(device: CpuDevice) -> None:
    """Work after `wait_event` sees what the other stream wrote before the event."""
    gate = threading.Event()
    value = torch.zeros(1)
    copied = torch.zeros(1)
    device.compute.submit(lambda: (gate.wait(), value.fill_(7.0), None)[2])
    device.copy.wait_event(device.compute.record())
    device.copy.submit(lambda: (copied.copy_(value), None)[1])
    done = device.copy.record()
    assert not done.query()
    gate.set()
    done.wait()
    assert copied.item() == 7.0


def test_compute_has_its_threads() -> None:
    """The compute stream runs with the device's number of threads, whatever other threads set."""
    opened = CpuDevice(num_threads=3)
    seen: list[int] = []
    opened.copy.record().wait()
    opened.compute.submit(lambda: seen.append(torch.get_num_threads()))
    opened.close()
    assert seen == [3]


def test_event_times_follow_the_stream(device: CpuDevice) -> None:
    """An event's time is when the stream passed it, so later events are not earlier."""
    first = device.compute.record()
    device.compute.submit(lambda: None)
    second = device.compute.record()
    second.wait()
    assert 0 < first.time_ns() <= second.time_ns()


def test_a_failure_reaches_every_later_wait(device: CpuDevice) -> None:
    """After work failed, no later work runs and every later event raises, on both streams."""
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("broken kernel")

    device.compute.submit(fail)
    device.compute.submit(lambda: ran.append(1))
    event = device.compute.record()
    device.copy.wait_event(event)
    copy_event = device.copy.record()
    for failed in (event, copy_event):
        with pytest.raises(RuntimeError, match="device work failed"):
            failed.wait()
    assert ran == []


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99", "cpu:1"])
def test_unknown_devices_are_refused_by_name(name: str) -> None:
    """A device that cannot be opened raises `InvalidField` naming the field."""
    with pytest.raises(InvalidField) as caught:
        open_device(name)
    assert caught.value.metadata["field"] == "device"


# ---------------------------------------------------------------- event clock
# Times of a device whose clock drifts from the host's.

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


# ---------------------------------------------------------------- host
# The host's memory as the kernel tells it.

MIB = 2**20


@pytest.fixture
def proc(tmp_path):
    """A machine with 1000 MiB available."""
    (tmp_path / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable:    1024000 kB\n")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 1000), (str(500 * MIB), 400), (str(250 * MIB), 150), ("1", 0)]
)
def test_the_groups_limit_counts(proc, tmp_path, limit, expected):
    """A group may have what its limit leaves, and what of its file cache can be dropped."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    stat = f"anon 5\nactive_file {150 * MIB}\ninactive_file {50 * MIB}\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_memory(proc, tmp_path) == expected * MIB


def test_without_a_group_the_machine_counts(proc, tmp_path):
    """Where no group limits memory there is what the machine has."""
    assert available_memory(proc, tmp_path / "none") == 1000 * MIB
    assert available_memory() > 0


def anonymous():
    """Bytes of this process's own memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_freed_memory_goes_back_to_the_system():
    """Also what lies below memory that is still used, where glibc would keep it."""
    blocks = [b"x" * 2**16 for _ in range(100 * 16)]
    before, blocks[:-1] = anonymous(), []
    return_freed_memory()
    assert anonymous() < before - 80 * MIB
    assert blocks


# ---------------------------------------------------------------- cuda events
# Events of a GPU without one: what they tell the clock that dates them.


pytest.importorskip("cuda.bindings")


DRIFT = 1e-3  # so that a short test has some


class TimingEvent:
    """Passes when it is recorded, by a clock that is slow."""

    def record(self, stream: object) -> None:
        """Take the time."""
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: TimingEvent) -> float:
        return (other.at - self.at) * (1 - DRIFT) / 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> cuda.CudaClock:
    """One second passes in 20 ms."""
    monkeypatch.setattr(cuda, "timing_event", TimingEvent)
    monkeypatch.setattr("legato_engine.device.base._PERIOD_NS", 20_000_000)
    stream: Any = None
    return cuda.CudaClock(stream)


def test_an_event_is_dated_between_its_record_and_its_sight(clock: cuda.CudaClock) -> None:
    """In launches of two events, for which the host waits or looks; also when it is used again."""
    stream: Any = None
    begun, ended = cuda.CudaEvent(clock), cuda.CudaEvent(clock)
    anchors = set()
    for index in range(60):
        before = time.perf_counter_ns()
        begun.record(stream)
        time.sleep(0.001)
        ended.record(stream)
        if index % 2:
            ended.wait()
        else:
            assert ended.query()
        after = time.perf_counter_ns()
        assert before <= begun.time_ns() <= after
        assert before <= ended.time_ns() <= after + 1_000_000 * DRIFT
        assert 1_000_000 * (1 - DRIFT) <= ended.time_ns() - begun.time_ns() <= after - before
        anchors.add(id(clock.anchor))
    assert len(anchors) > 1


def test_an_event_that_is_the_anchor_is_not_recorded_again(clock: cuda.CudaClock) -> None:
    """Another one takes its place."""
    stream: Any = None
    event = cuda.CudaEvent(clock)
    time.sleep(0.03)
    event.record(stream)
    event.wait()
    first = event.time_ns()
    assert event.event is not clock.anchor
    assert event.time_ns() == first
    event.record(stream)
    event.wait()
    assert event.time_ns() > first
