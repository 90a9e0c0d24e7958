"""The latency policy of a service process."""

import gc
import os
import subprocess
import sys

import pytest
from legato_engine.ipc.latency_policy import SHARED
from legato_service import lifecycle

_TUNED = """
import os, sys, threading

cores = range(int(sys.argv[1]))
os.sched_getaffinity = lambda _: cores
from legato_engine.ipc import latency_policy
from legato_service import lifecycle as tuning

os.sched_setscheduler(0, int(sys.argv[2]), os.sched_param(0))
tuning.tune_process(latency_policy.resolve(sys.argv[3]))
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0)))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("cores", "setting", "given", "then"),
    [
        (2, "auto", os.SCHED_OTHER, os.SCHED_BATCH),
        (2, "auto", os.SCHED_IDLE, os.SCHED_IDLE),
        (16, "auto", os.SCHED_OTHER, os.SCHED_OTHER),
        (2, "low-latency", os.SCHED_OTHER, os.SCHED_OTHER),
        (16, "shared", os.SCHED_OTHER, os.SCHED_BATCH),
    ],
)
def test_threads_are_scheduled_by_the_policy(cores, setting, given, then):
    """Later threads inherit it; a policy that was set from outside stays."""
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _TUNED, str(cores), str(given), setting]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == then


def test_a_refused_scheduling_policy_is_ignored(monkeypatch):
    """Garbage collection is set all the same."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    thresholds = gc.get_threshold()
    try:
        lifecycle.tune_process(SHARED)
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == SHARED.service_gc
    finally:
        gc.set_threshold(*thresholds)
