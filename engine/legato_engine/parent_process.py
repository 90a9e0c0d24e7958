"""The bond of a child process to its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int) -> None:
    """Ignore stop signals and die with the parent; call it first in a child.

    A terminal signals all processes; only the parent acts on that. On Linux the parent is the
    thread that started the child.
    """
    faulthandler.enable()  # SIGABRT writes the stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before `prctl`
        os._exit(1)
