"""A process that cannot get away is ended, and says where it stood."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.server import ENVIRONMENT

PROGRAM = """
import threading
from legato_service.lifecycle import watchdog
watchdog.TIMEOUT = {timeout}
watchdog.arm_watchdog()
def a_library_that_does_not_let_go():
    threading.Event().wait({seconds})
a_library_that_does_not_let_go()
"""


def run(seconds: float, timeout: float) -> subprocess.CompletedProcess[str]:
    """The exit of a process that takes so long to leave."""
    program = PROGRAM.format(seconds=seconds, timeout=timeout)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


def test_who_hangs_is_ended_with_its_stacks() -> None:
    """The exit code is 1, and the last words name the place."""
    ended = run(60, timeout=0.5)
    assert ended.returncode == 1
    assert "a_library_that_does_not_let_go" in ended.stderr


def test_who_leaves_in_time_is_let_go() -> None:
    """Nothing is said."""
    ended = run(0, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
