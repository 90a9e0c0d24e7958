"""Restart delays and the child process."""

import signal
import sys

from legato_engine.client.supervisor import Backoff, ChildProcess


def test_backoff_doubles_up_to_the_cap_and_resets():
    """Every crash doubles the delay up to the cap; a stable run starts over."""
    backoff = Backoff(first=1, cap=5, stable=60)
    assert [backoff.delay_after(0) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.delay_after(60), backoff.delay_after(59)] == [1, 2]


async def test_kill_takes_the_whole_group():
    """Children of the engine are killed with it."""
    script = "import subprocess,sys; p=subprocess.Popen(['sleep','60']); p.wait()"
    process = await ChildProcess.spawn([sys.executable, "-c", script])
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert not process.alive
    process.kill()  # again, with no process left


async def test_abort_ends_a_process_that_ignores_it():
    """A process that ignores SIGABRT is killed."""
    script = (
        "import signal,time; signal.signal(6, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    process = await ChildProcess.spawn([sys.executable, "-c", script])
    await process.abort()
    assert await process.wait() in (-signal.SIGKILL, -signal.SIGABRT)
