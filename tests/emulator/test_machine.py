"""The emulated machine: its instructions, and the faults that it and sanitizers find."""

from __future__ import annotations

import enum
import functools
import os
import pathlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.arm64 import CROSS, EMULATOR, on_arm64
from tests.emulator.module import (
    CHECKS,
    FLAGS,
    SANITIZERS,
    EmulatedFault,
    EmulatedModule,
    Schedule,
    compiler,
    sources,
)

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


# ---------------------------------------------------------------- sanitizers
# The emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
#
# Both have to be in a process before Python, so that each test is a process of its own. Beyond
# what
# the machine checks always, they find reads and writes beyond the ends of tensors and variables,
# and
# all that C++ leaves undefined; they end the process, and say where.

ROOT = Path(__file__).parents[2]
FAULTY = """
import sys
import torch
from tests.emulator.module import EmulatedModule, Schedule
fault, index, shared = map(int, sys.argv[1:])
module = EmulatedModule("machine_kernels.cu", {}, folder=FOLDER)
source, word = torch.zeros(128, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
module.kernel("faulty", shared=shared).launch((1, 1, 1), 64, (source, word, fault, index))
"""
BEYOND_PAGES = """
from tests.emulator.module import SMALL, emulated
from tests.megakernel.words import Rows, World
table = "(int)pages[row[i / OWN_PAGES] * row_pages + page]"
world = World(SMALL, emulated(None, ("step.cu", f"page < row_pages ? {table} : 0", table)))
Rows(world, 3).run(world.kernel(3), 1)
"""


@functools.cache
def runtimes() -> str | None:
    """GCC's libraries of the sanitizers; another compiler's are not told of switches."""

    def told(*asked: str) -> str:
        command = (compiler() or "false", *asked)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if "Free Software Foundation" not in told("--version"):
        return None
    paths = [told(f"-print-file-name={name}") for name in ("libasan.so", "libubsan.so")]
    return ":".join(paths) if all(Path(path).is_absolute() for path in paths) else None


def sanitized(*arguments: str) -> tuple[int, str]:
    """How Python has ended, and what it and the sanitizers have said."""
    environment = {
        **os.environ,
        SANITIZERS: "1",
        "LD_PRELOAD": runtimes() or "",
        "ASAN_OPTIONS": "detect_leaks=0:redzone=512",  # Python leaks; farther ends are seen
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, *arguments]
    ran = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.skipif(runtimes() is None, reason="needs GCC with both sanitizers")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "subject", ["machine", "kernels", "steps", "resident", "values", "drafts", "both"]
)
def test_nothing_is_found(subject: str) -> None:
    """In all tests of the subject that are neither slow nor plant faults."""
    only = ("-m", "not slow", "-k", "not fault")
    alone = ("-s", "-n", "0", "--timeout", "0", "-p", "no:cacheprovider")
    ended, said = sanitized("-m", "pytest", *only, *alone, f"tests/emulator/test_{subject}.py")
    assert ended == 0, said[-20_000:]


SANITIZER_FAULTS = [
    (Fault.BEYOND_TENSOR, 32, SHARED, "heap-buffer-overflow .* block 0 warp"),
    (Fault.BEYOND_VARIABLE, 4, SHARED, "stack-buffer-overflow .* block 0 warp"),
    (Fault.BEYOND, 1000, 1000, "use-after-poison .* block 0 warp"),  # not as far as the guard page
    (Fault.CAST, 3, SHARED, "outside the range of representable values"),
    (Fault.INDEX, 4, SHARED, "index 4 out of bounds"),
]


@pytest.mark.skipif(runtimes() is None, reason="needs GCC with both sanitizers")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "index", "shared", "says"), SANITIZER_FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault, index: int, shared: int, says: str) -> None:
    ended, said = sanitized("-c", FAULTY, str(int(fault)), str(index), str(shared))
    assert ended != 0
    assert re.search(says, " ".join(said.split())), said
    assert "machine_kernels.cu" in said


@pytest.mark.skipif(runtimes() is None, reason="needs GCC with both sanitizers")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_page_table_that_is_read_beyond_its_end_is_found() -> None:
    """By the megakernel, whose steps are as they should be nevertheless."""
    ended, said = sanitized("-c", BEYOND_PAGES)
    assert ended != 0
    assert "ERROR: AddressSanitizer: heap" in said, said
    assert "in steps " in said
    assert "step.cu:" in said


SOURCES = Path(__file__).parent


def printed(compile_with: str, folder: Path, *run_by: str) -> list[str]:
    """What `launches.cpp` says, compiled with the machine and its kernels."""
    for file, text in sources("machine_kernels.cu", SOURCES).items():
        (folder / file).write_text(text)
    program = folder / "launches"
    files = (folder / "machine_kernels.cu", SOURCES / "machine.cpp", SOURCES / "launches.cpp")
    flags = (*FLAGS, *CHECKS, "-O1", "-static", f"-I{SOURCES}")
    command = (compile_with, *flags, "-o", program, "-x", "c++", *files)
    subprocess.run(command, check=True)
    done = subprocess.run((*run_by, program), check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@on_arm64
def test_a_seed_is_the_same_order_and_the_same_faults_as_on_x86(tmp_path: Path) -> None:
    """Results, orders of threads, and what is said of faults that their threads cause."""
    for name in ("x86", "arm64"):
        (tmp_path / name).mkdir()
    x86 = printed("g++", tmp_path / "x86")
    arm64 = printed(CROSS, tmp_path / "arm64", EMULATOR)
    assert sum(": ended, " in line for line in x86) == 60
    assert sum(": failed, " in line for line in x86) == 33
    assert arm64 == x86
