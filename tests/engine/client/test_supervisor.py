"""Restart delays and the child process."""

import asyncio
import pathlib
import signal
import sys
import tempfile

from legato_engine.client.engine_client import Backoff, ChildProcess


def delays(backoff, count, **how):
    """The delays after as many deaths of this kind."""
    return [backoff.delay(**{"ready": False, "served": False, **how}) for _ in range(count)]


def test_a_process_that_never_got_ready_is_restarted_ever_later():
    """Every crash doubles the delay up to the cap."""
    assert delays(Backoff(first=1, cap=5, ready_cap=2), 5) == [1, 2, 4, 5, 5]


def test_a_process_that_got_ready_and_served_nothing_is_restarted_a_little_later():
    """Up to a lower cap: it starts well."""
    backoff = Backoff(first=1, cap=50, ready_cap=3)
    assert delays(backoff, 4, ready=True) == [1, 2, 3, 3]
    assert delays(backoff, 2) == [6, 12]
    assert delays(backoff, 1, ready=True) == [3]


def test_a_process_that_served_is_restarted_at_once():
    """However often it dies; and the delays start over."""
    backoff = Backoff(first=1, cap=5, ready_cap=2)
    assert delays(backoff, 3) == [1, 2, 4]
    assert delays(backoff, 100, ready=True, served=True) == [0] * 100
    assert delays(backoff, 1) == [1]


async def test_kill_takes_the_whole_group():
    """Children of the engine are killed with it."""
    script = "import subprocess,sys; p=subprocess.Popen(['sleep','60']); p.wait()"
    process = await ChildProcess.spawn([sys.executable, "-c", script])
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert not process.alive
    process.kill()  # again, with no process left


async def test_a_process_that_is_asked_for_its_stacks_goes_on():
    """It writes them and lives."""
    script = (
        "import faulthandler,signal,sys,time; faulthandler.register(signal.SIGUSR2);"
        "sys.stdin.close(); open(sys.argv[1], 'w').close(); time.sleep(60)"
    )
    with tempfile.TemporaryDirectory() as folder:
        mark = pathlib.Path(folder) / "mark"
        process = await ChildProcess.spawn([sys.executable, "-c", script, str(mark)])
        while not mark.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        process.dump_stacks()
        await process.wait_at_most(0.2)
        assert process.alive
        assert process.bytes_read() > 0
        process.kill()
        await process.wait()
        process.dump_stacks()  # without effect
