"""How gRPC is set up in the process of a caller."""

import json
import os
import socket
import subprocess
import sys
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

BATCHES, CALLS = 20, 5

_CALLER = """
import json, os, re, sys
from pathlib import Path

EARLY

import legato_client
import grpc

def wakes():
    return sum(
        int(re.findall(r"voluntary_ctxt_switches:\\s+(\\d+)", (task / "status").read_text())[0])
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "event_engine"
    )

with grpc.insecure_channel(sys.argv[1]) as channel:
    echo = channel.unary_unary("/echo/Echo")
    echo(b"first")
    woken = []
    for _ in range(int(sys.argv[2])):
        before = wakes()
        for _ in range(int(sys.argv[3])):
            echo(b"again")
        woken.append(wakes() - before)
    print(json.dumps({"woken": sorted(woken), "left": os.environ.get("GRPC_EXPERIMENTS")}))
"""


_EARLY_CALLER = """
import sys, time

import legato_client
import grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    echo = channel.unary_unary("/echo/Echo")
    refused = False
    while True:
        try:
            echo(b"are you there?")
            break
        except grpc.RpcError:
            if not refused:
                print("refused", flush=True)
            refused = True
            time.sleep(0.1)
print("reached", flush=True)
"""


@contextmanager
def _echo(port=0):
    """A server that answers with what it is sent; its port."""
    with futures.ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        handlers = grpc.method_handlers_generic_handler("echo", {"Echo": handler})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def _call(*, given=None, early=""):
    """What a program saw that made calls after it imported this package; `early` it ran before.

    Of the batches of calls one of the quickest counts: some wakes a second are the clock's.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PYTHONPATH": paths} | ({} if given is None else {"GRPC_EXPERIMENTS": given})
    caller = _CALLER.replace("EARLY", early)
    with _echo() as port:
        done = subprocess.run(
            [sys.executable, "-c", caller, f"127.0.0.1:{port}", str(BATCHES), str(CALLS)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    seen = json.loads(done.stdout)
    return {**seen, "woken": seen["woken"][BATCHES // 4]}


def test_answers_are_read_by_who_waits_for_them():
    """No thread of grpc's event engine wakes for each call, and the environment is as it was."""
    seen = _call()
    assert seen["woken"] < CALLS / 2
    assert seen["left"] is None


@pytest.mark.parametrize(("given", "early"), [("event_engine_client", ""), (None, "import grpc")])
def test_a_program_decides_for_itself(given, early):
    """What its environment says of grpc holds, and so does what grpc read before."""
    seen = _call(given=given, early=early)
    assert seen["woken"] > CALLS / 2
    assert seen["left"] == given


@contextmanager
def _early_caller(port, **environment):
    """A program that asks a server again and again until it is there."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", _EARLY_CALLER, f"127.0.0.1:{port}"],
        env={"PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        try:
            yield caller
        finally:
            caller.kill()


def test_a_server_that_comes_late_is_noticed():
    """A client that asks only now and then notices the server.

    It does so sooner than one that says how seldom gRPC looks at connections between calls.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seldom = {"GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "4000"}
    with _early_caller(port) as caller, _early_caller(port, **seldom) as other:
        for each in (caller, other):
            assert each.stdout.readline() == "refused\n"
        with _echo(port):
            assert caller.stdout.readline() == "reached\n"
            assert other.poll() is None
