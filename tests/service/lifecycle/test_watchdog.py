"""The shutdown watchdog."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.server import ENVIRONMENT

PROGRAM = """
import threading
from legato_service import lifecycle as watchdog
watchdog.TIMEOUT = {timeout}
watchdog.arm_watchdog()
def a_library_that_blocks():
    threading.Event().wait({seconds})
a_library_that_blocks()
"""


def run(seconds: float, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a process whose shutdown takes `seconds`."""
    program = PROGRAM.format(seconds=seconds, timeout=timeout)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_hanging_process_is_ended_with_its_stacks() -> None:
    """The exit code is 1, and stderr names the function that blocks."""
    ended = run(60, timeout=0.5)
    assert ended.returncode == 1
    assert "a_library_that_blocks" in ended.stderr


def test_a_process_that_exits_in_time_is_left_alone() -> None:
    """It writes nothing."""
    ended = run(0, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
