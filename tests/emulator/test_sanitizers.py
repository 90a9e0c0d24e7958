"""The emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

Both have to be in a process before Python, so that each test is a process of its own. Beyond what
the machine checks always, they find reads and writes beyond the ends of tensors and variables, and
all that C++ leaves undefined; they end the process, and say where.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.build import SANITIZERS, compiler
from tests.emulator.test_machine import SHARED, Fault

ROOT = Path(__file__).parents[2]
FAULTY = """
import sys
import torch
from tests.emulator.module import EmulatedModule, Schedule
from tests.emulator.test_machine import FOLDER
fault, index, shared = map(int, sys.argv[1:])
module = EmulatedModule("machine_kernels.cu", {}, folder=FOLDER)
source, word = torch.zeros(128, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
module.kernel("faulty", shared=shared).launch((1, 1, 1), 64, (source, word, fault, index))
"""
BEYOND_PAGES = """
from tests.emulator.small import SMALL, emulated
from tests.resident.words import Rows, World
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


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(runtimes() is None, reason="needs GCC with both sanitizers"),
]


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


@pytest.mark.parametrize(
    "subject", ["machine", "kernels", "steps", "resident", "values", "drafts", "both"]
)
def test_nothing_is_found(subject: str) -> None:
    """In all tests of the subject that are neither slow nor plant faults."""
    only = ("-m", "not slow", "-k", "not fault")
    alone = ("-s", "-n", "0", "--timeout", "0", "-p", "no:cacheprovider")
    ended, said = sanitized("-m", "pytest", *only, *alone, f"tests/emulator/test_{subject}.py")
    assert ended == 0, said[-20_000:]


FAULTS = [
    (Fault.BEYOND_TENSOR, 32, SHARED, "heap-buffer-overflow .* block 0 warp"),
    (Fault.BEYOND_VARIABLE, 4, SHARED, "stack-buffer-overflow .* block 0 warp"),
    (Fault.BEYOND, 1000, 1000, "use-after-poison .* block 0 warp"),  # not as far as the guard page
    (Fault.CAST, 3, SHARED, "outside the range of representable values"),
    (Fault.INDEX, 4, SHARED, "index 4 out of bounds"),
]


@pytest.mark.parametrize(("fault", "index", "shared", "says"), FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault, index: int, shared: int, says: str) -> None:
    ended, said = sanitized("-c", FAULTY, str(int(fault)), str(index), str(shared))
    assert ended != 0
    assert re.search(says, " ".join(said.split())), said
    assert "machine_kernels.cu" in said


def test_a_page_table_that_is_read_beyond_its_end_is_found() -> None:
    """By the megakernel, whose steps are as they should be nevertheless."""
    ended, said = sanitized("-c", BEYOND_PAGES)
    assert ended != 0
    assert "ERROR: AddressSanitizer: heap" in said, said
    assert "in steps " in said
    assert "step.cu:" in said
