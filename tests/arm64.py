"""Programs for arm64, made by a cross compiler on x86-64 and run by an emulator.

`apt install g++-aarch64-linux-gnu qemu-user` is all that they need. An emulator says nothing of
speed.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable

import pytest

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def on_arm64(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that compares such programs with those of this machine."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(600),
        pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86"),
        pytest.mark.skipif(
            not (shutil.which(CROSS) and shutil.which(EMULATOR)),
            reason=f"needs {CROSS} and {EMULATOR}",
        ),
    ):
        test = mark(test)
    return test
