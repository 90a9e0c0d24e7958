"""The ids that the service gives to requests."""

from __future__ import annotations

import subprocess
import sys

from legato_service.rpc.call import Call

FORK = """
import os
from legato_service.rpc.call import Call

Call("/a.B/C")
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, ",".join(Call("/a.B/C").request_id for _ in range(100)).encode())
    os._exit(0)
os.wait()
print(os.read(read, 10_000).decode())
print(",".join(Call("/a.B/C").request_id for _ in range(100)))
"""


def test_every_call_has_an_id_of_its_own() -> None:
    ids = [Call("/a.B/C").request_id for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(each) for each in ids} == {32}


def test_a_forked_process_gives_other_ids() -> None:
    """Ids are drawn in advance, and what was drawn stays with the parent."""
    told = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=True
    ).stdout
    theirs, ours = (line.split(",") for line in told.splitlines())
    assert len(theirs) == len(ours) == 100
    assert not set(theirs) & set(ours)
