"""The emulated machine: what its instructions compute, and what it does not let pass.

Shape legend: L lanes of a warp.
"""

from __future__ import annotations

import enum
import pathlib

import pytest
import torch

from tests.emulator.module import EmulatedFault, EmulatedModule, Schedule

FOLDER = pathlib.Path(__file__).parent
SHARED = 1024


class Fault(enum.IntEnum):
    """As the source has them."""

    NOT_ALIGNED = 0
    BEYOND = 1
    ABSENT_LANE = 2
    OTHER_COLLECTIVE = 3
    OTHER_COUNT = 4
    MANY_ARRIVALS = 5
    UNFINISHED_COPY = 6
    STUCK = 7
    ENDLESS = 8
    TRAP = 9
    INDEX = 10
    BEYOND_TENSOR = 11
    BEYOND_VARIABLE = 12
    CAST = 13


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return Schedule(most_turns=200_000)


@pytest.fixture(scope="module")
def module(schedule: Schedule) -> EmulatedModule:
    return EmulatedModule("machine_kernels.cu", {}, folder=FOLDER, schedule=schedule)


def launch(module: EmulatedModule, name: str, threads: int, *arguments: torch.Tensor | int) -> None:
    module.kernel(name, shared=SHARED).launch((1, 1, 1), threads, arguments)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.half])
def test_products_have_the_layout_of_the_instruction(
    module: EmulatedModule, kind: torch.dtype
) -> None:
    """A lane's operands of a product have the places that the instruction defines.

    Lane 4g + t: of A rows g and g + 8, columns 2t, 2t + 1 and 8 more; of B those rows of column g;
    of D rows g and g + 8, columns 2t and 2t + 1.
    """
    torch.manual_seed(0)
    a, b, d = torch.randn(16, 16).to(kind), torch.randn(16, 8).to(kind), torch.randn(16, 8)
    a_L = a.view(2, 8, 2, 4, 2).permute(1, 3, 2, 0, 4).reshape(32, 8).contiguous()
    b_L = b.view(2, 4, 2, 8).permute(3, 1, 0, 2).reshape(32, 4).contiguous()
    d_L = d.view(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4).contiguous()
    launch(module, "multiply", 32, a_L, b_L, d_L, int(kind == torch.half))
    result = d_L.view(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)
    assert torch.allclose(result, d + a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_matrices_are_loaded_transposed(module: EmulatedModule) -> None:
    """A lane's pair is column g of rows 2t and 2t + 1, and once more transposed row g."""
    rows = torch.arange(4 * 8 * 8, dtype=torch.int16)
    loaded, turned = (torch.zeros(4, 32, 2, dtype=torch.int16) for _ in range(2))
    launch(module, "turn", 32, rows, loaded, turned)
    matrices = rows.view(4, 8, 8)
    assert torch.equal(loaded.view(4, 8, 8), matrices.mT)
    assert torch.equal(turned.view(4, 8, 8), matrices)


def test_lanes_of_a_warp_exchange_words(module: EmulatedModule) -> None:
    """Also those of a part of it alone."""
    torch.manual_seed(1)
    values = torch.randint(-1000, 1000, (64,), dtype=torch.int32)
    out = torch.zeros(64, 8, dtype=torch.int32)
    launch(module, "warp_words", 64, values, out)
    for warp in range(2):
        v, told = values[warp * 32 :][:32], out[warp * 32 :][:32].T
        lane = torch.arange(32)
        assert torch.equal(told[0], v[5].expand(32))
        assert torch.equal(told[1], v[lane ^ 3])
        assert torch.equal(told[2], v[torch.where(lane < 4, lane, lane - 4)])
        assert torch.equal(told[3], v.sum().int().expand(32))
        assert torch.equal(told[4], v.max().expand(32))
        bits = sum(1 << i for i in range(32) if v[i] % 2)
        assert {word & 0xFFFFFFFF for word in told[5].tolist()} == {bits}
        assert set(told[6].tolist()) == {int(bool((v == values[7]).any()))}
        assert torch.equal(told[7][:8], v[lane[:8] ^ 1])


def test_a_copy_lands_late(module: EmulatedModule) -> None:
    """After the wait it is there whole; before, in some order of threads, it is not."""
    source = torch.arange(128, dtype=torch.int32)
    seen = set()
    for _ in range(20):
        out = torch.zeros(32, dtype=torch.int32)
        launch(module, "copied", 32, source, out, 0)
        assert torch.equal(out, source[::4])
        launch(module, "copied", 32, source, out, 1)
        seen |= set((out == source[::4]).tolist())
    assert False in seen


FAULTS = [
    (Fault.NOT_ALIGNED, 4, "lane .*: a load of 16 bytes that is not aligned"),
    (Fault.BEYOND, SHARED, "an access at shared memory [+] 1024, of 1024 bytes .*machine_kernels"),
    (Fault.ABSENT_LANE, 9, "a shuffle from lane 9, which takes no part"),
    (Fault.OTHER_COLLECTIVE, 0, "of its warp wait for it in "),
    (Fault.OTHER_COUNT, 0, "barrier 3 for .* threads, others wait there for "),
    (
        Fault.MANY_ARRIVALS,
        0,
        r"more arrivals at a barrier \(shared memory [+] 512\) than it counts",
    ),
    (Fault.UNFINISHED_COPY, 0, "copies are under way when all threads have ended"),
    (Fault.ENDLESS, 0, "more turns than a launch may take"),
    (Fault.TRAP, 0, "a trap"),
    (Fault.INDEX, 4, "what C[+][+] leaves undefined .*machine_kernels.cu:"),
]


@pytest.mark.parametrize(("fault", "index", "says"), FAULTS, ids=str)
def test_what_no_gpu_allows_is_a_fault(
    module: EmulatedModule, fault: Fault, index: int, says: str
) -> None:
    """It says which thread did what."""
    source, word = torch.zeros(128, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with pytest.raises(EmulatedFault, match=says):
        launch(module, "faulty", 64, source, word, fault, index)


def test_a_deadlock_says_what_every_thread_waits_for(module: EmulatedModule) -> None:
    source, word = torch.zeros(128, dtype=torch.int32), torch.full((8,), 5, dtype=torch.int32)
    with pytest.raises(EmulatedFault) as caught:
        launch(module, "faulty", 64, source, word, Fault.STUCK, 0)
    said = str(caught.value)
    assert said.startswith("deadlock")
    assert "block 0 warps 0 lanes ffffffff: the word at argument 1 + 0, now 0x5" in said
    assert "block 0 warps 1 lanes ffffffff: barrier 5" in said
