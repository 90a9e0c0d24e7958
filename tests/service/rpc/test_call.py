"""The ids that the service gives to requests."""

from __future__ import annotations

import os

from legato_service.rpc.call import Call


def test_every_call_has_an_id_of_its_own() -> None:
    ids = [Call("/a.B/C").request_id for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(each) for each in ids} == {32}


def test_a_forked_process_gives_other_ids() -> None:
    """Ids are drawn in advance, and what was drawn stays with the parent."""
    Call("/a.B/C")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, ",".join(Call("/a.B/C").request_id for _ in range(200)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as source:
        theirs = source.read().decode().split(",")
    os.waitpid(pid, 0)
    ours = [Call("/a.B/C").request_id for _ in range(200)]
    assert len(theirs) == 200
    assert not set(ours) & set(theirs)
