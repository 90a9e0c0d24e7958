"""The CPU's streams are real: ordered, concurrent, and honest about failures."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.device.select import open_device
from legato_engine.errors import InvalidField


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
