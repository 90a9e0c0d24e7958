"""What a service process asks of its interpreter and of the kernel."""

import gc
import os
import subprocess
import sys

import pytest
from legato_service.lifecycle import tuning

_TUNED = """
import os, sys, threading
from legato_service.lifecycle import tuning

cores = range(int(sys.argv[1]))
os.sched_getaffinity = lambda _: cores
os.sched_setscheduler(0, int(sys.argv[2]), os.sched_param(0))
tuning.tune_process()
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0)))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("cores", "given", "then"),
    [
        (2, os.SCHED_OTHER, os.SCHED_BATCH),
        (2, os.SCHED_IDLE, os.SCHED_IDLE),
        (16, os.SCHED_OTHER, os.SCHED_OTHER),
    ],
)
def test_on_few_cores_threads_wait_for_who_runs(cores, given, then):
    """Also those of later; what somebody chose for the process stays."""
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _TUNED, str(cores), str(given)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(told.stdout) == then


def test_a_kernel_that_refuses_is_no_failure(monkeypatch):
    """All else is asked for all the same."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(tuning, "cores_abound", lambda: False)
    thresholds = gc.get_threshold()
    try:
        tuning.tune_process()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == tuning._THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
