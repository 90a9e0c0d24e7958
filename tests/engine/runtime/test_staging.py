"""Fields that reach the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.runtime.buffers import Fields, StagingBuffer, StagingRoom, size_of

FIELDS: tuple[Fields, ...] = (
    {"a": ((3,), torch.int64)},
    {"b": ((5,), torch.float32), "c": ((2, 2), torch.int64)},
    {"d": ((1,), torch.int64)},
)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(1)
    yield made
    made.close()


@pytest.fixture
def buffers(device: CpuDevice) -> list[StagingBuffer]:
    room = StagingRoom(device, sum(map(size_of, FIELDS)))
    return [StagingBuffer(device, fields, room=room, copies=2) for fields in FIELDS]


def on_device(buffers: list[StagingBuffer], device: CpuDevice) -> list[float]:
    """The first element of each field."""
    device.compute.record().wait()
    fields = [field for each in buffers for field in each.device.values()]
    return [float(field.flatten()[0]) for field in fields]


@pytest.mark.parametrize(
    ("first", "seen"), [(0, [1, 2, 3, 4]), (1, [0, 2, 3, 4]), (2, [0, 0, 0, 4])]
)
def test_neighbours_are_one_copy(
    device: CpuDevice, buffers: list[StagingBuffer], first: int, seen: list[float]
) -> None:
    """From a buffer up to a later one, and no other."""
    for number, (buffer, name) in enumerate(
        zip((buffers[0], buffers[1], buffers[1], buffers[2]), "abcd", strict=True), 1
    ):
        buffer.host[name].fill(number)
    buffers[2].upload_from(buffers[first], device.compute)
    assert on_device(buffers, device) == seen


def test_a_later_host_side_is_uploaded_alone(
    device: CpuDevice, buffers: list[StagingBuffer]
) -> None:
    for side, number in zip(buffers[1].hosts, (7, 8), strict=True):
        side["b"].fill(number)
    buffers[1].upload(device.compute, 1)
    assert on_device(buffers, device) == [0, 8, 0, 0]
