"""The emulated machine on arm64, compiled by a cross compiler and run by an emulator of that.

`apt install g++-aarch64-linux-gnu qemu-user` is all that it needs.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.emulator.build import CHECKS, FLAGS, sources

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FOLDER = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86"),
    pytest.mark.skipif(
        not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"needs {CROSS} and {EMULATOR}"
    ),
]


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
