"""A service process that is the first of a container reaps what others leave."""

import json
import os
import subprocess
import sys

import pytest
from legato_service import lifecycle

# The child leaves orphans that live on for a moment, and exits with a code that its parent wants.
PROGRAM = """
import asyncio, ctypes, json, pathlib, sys
from legato_service import lifecycle as orphans

LEAVES_ORPHANS = (
    "import os, subprocess; [subprocess.Popen(['sleep', '0.1']) for _ in range(5)]; os._exit(7)"
)

def num_children():
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    return sum(len(each.read_text().split()) for each in tasks)

async def main(reaps):
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    assert orphans.inherits_orphans()
    reaping = asyncio.create_task(orphans.reap_orphans(0.05)) if reaps else None
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", LEAVES_ORPHANS)
    code = await child.wait()
    inherited = num_children()
    while num_children() if reaps else len(list(orphans._zombies())) < 5:
        await asyncio.sleep(0.01)
    print(json.dumps([code, inherited, num_children()]))

asyncio.run(main(sys.argv[1] == "reaps"))
"""


@pytest.mark.parametrize(("mode", "left"), [("reaps", 0), ("leaves them", 5)])
def test_orphans_are_reaped(mode, left):
    """All zombies of others go, and the exit code of an own child is not lost."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], check=True, stdout=subprocess.PIPE, env=environment()
    )
    assert json.loads(done.stdout) == [7, 5, left]


def test_an_ordinary_process_inherits_none():
    """Its orphans go to the first process, which is another."""
    assert not lifecycle.inherits_orphans()


def environment():
    """That of a child that imports what this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
