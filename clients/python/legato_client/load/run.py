"""Runs a plan in sender processes."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import grpc

from legato_client.load.plan import LoadPlan
from legato_client.load.report import LoadResults
from legato_client.load.sender import send
from legato_client.load.targets import CallFailed, reason_of

_READY = 60.0  # seconds a sender may take to start
_PATIENCE = 30.0  # beyond the plan's own end and its last deadline
_HEAD_START = 0.5  # seconds from the last sender's start to the first request


class LoadFailed(Exception):
    """A sender could not send."""


def run(plan: LoadPlan) -> LoadResults:
    """Run the plan. Raises `LoadFailed` if a sender ends without a record."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for share in range(plan.senders):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there, plan, share), daemon=True)
            process.start()
            there.close()  # only the process holds it, so its death can be read
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe, _READY)
        start = time.monotonic() + _HEAD_START
        for pipe in pipes:
            pipe.send(start)
        total = LoadResults()
        for pipe in pipes:
            total.merge(_receive(pipe, plan.seconds + plan.timeout + _PATIENCE))
        return total
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection, seconds: float) -> LoadResults:
    """Receive a sender's record; it sends an empty one when it is ready, then its own."""
    try:
        if not pipe.poll(seconds):
            raise LoadFailed(f"a sender said nothing for {seconds:g} s")
        said = pipe.recv()
    except EOFError:
        raise LoadFailed("a sender died") from None
    if isinstance(said, str):
        raise LoadFailed(said)
    assert isinstance(said, LoadResults)
    return said


def _serve(pipe: Connection, plan: LoadPlan, share: int) -> None:
    pipe.send(LoadResults())
    try:
        pipe.send(send(plan, share, pipe.recv()))
    except (grpc.RpcError, CallFailed) as error:
        pipe.send(f"the sessions could not be opened: {reason_of(error)}")
