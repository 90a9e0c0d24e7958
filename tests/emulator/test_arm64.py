"""The emulated machine on arm64, in an emulator of that."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.arm64 import CROSS, EMULATOR, MARKS
from tests.emulator.module import CHECKS, FLAGS, sources

FOLDER = Path(__file__).parent

pytestmark = MARKS


def printed(compile_with: str, folder: Path, *run_by: str) -> list[str]:
    """What `launches.cpp` says, compiled with the machine and its kernels."""
    for file, text in sources("machine_kernels.cu", FOLDER).items():
        (folder / file).write_text(text)
    program = folder / "launches"
    files = (folder / "machine_kernels.cu", FOLDER / "machine.cpp", FOLDER / "launches.cpp")
    flags = (*FLAGS, *CHECKS, "-O1", "-static", f"-I{FOLDER}")
    command = (compile_with, *flags, "-o", program, "-x", "c++", *files)
    subprocess.run(command, check=True)
    done = subprocess.run((*run_by, program), check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_a_seed_is_the_same_order_and_the_same_faults_as_on_x86(tmp_path: Path) -> None:
    """Results, orders of threads, and what is said of faults that their threads cause."""
    for name in ("x86", "arm64"):
        (tmp_path / name).mkdir()
    x86 = printed("g++", tmp_path / "x86")
    arm64 = printed(CROSS, tmp_path / "arm64", EMULATOR)
    assert sum(": ended, " in line for line in x86) == 60
    assert sum(": failed, " in line for line in x86) == 33
    assert arm64 == x86
