"""The fork server: `python -m tests.fork_server FD IMPORTED PADDING`.

A process that has imported what servers and engines import, or only what those of `SMALL` do,
and has run nothing of it. For each `Start` that it reads from FD it forks a process, which runs the
module as `python -m` would. That process becomes the child of the asking one: its first parent ends
at once, and the asking process is a subreaper meanwhile. The padding is room for the command lines
of forked processes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tests.fork_server.popen import CONFINED, MAX_MESSAGE, NAME, ForkServer, Start, prctl

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15

IMPORTED = {
    "all": (
        "legato_engine.core.assembly",
        "legato_engine.core.process",
        "legato_engine.models.decoder.families",
        "legato_engine.models.moondream.family",
        "legato_engine.models.moondream.model",
        "legato_engine.models.moondream.weights",
        "legato_service.__main__",
        "legato_service.workers.worker",
        "legato_tiny",
        "tests.e2e.victim",
        "tests.faults.attacks",
        "tests.fork_server.service",
    ),
    "little": (
        "legato_engine.images.decoding_worker",
        "legato_engine.ipc.service_connections",
        "legato_engine.ipc.service_connections",
        "legato_engine.shm",
    ),
}
SERVICES = ("legato_service", "tests.e2e.quick_service", "tests.service.fake_service")
_FIRST_FREE_FD = 3
_HIGH_FD = 512  # above all that a child is given


def main() -> None:
    """Serve; in a forked process, run its module."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_NAME, NAME.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the channel ends this process
    for name in IMPORTED[sys.argv[2]]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in forked processes"
    gc.collect()
    gc.freeze()  # a collection would copy pages that processes share
    run(serve(channel))


def serve(channel: socket.socket) -> Start:
    """Fork a process for every `Start`; return in the forked ones, end with the asking process."""
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 64)
        if not data:
            os._exit(0)
        start = msgspec.json.decode(data, type=Start)
        pid = _fork()
        if pid == 0:
            channel.close()
            _take(fds, start.fds)
            return start
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


def _fork() -> int:
    """Fork a process whose parent has ended; return its id, 0 in itself."""
    end, other_end = os.pipe()
    between = os.fork()
    if between:
        os.close(other_end)
        os.waitpid(between, 0)
        pid = int(os.read(end, 32))
        os.close(end)
        return pid
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(other_end, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    return 0


def _take(fds: list[int], targets: list[int]) -> None:
    """Have these files, under these numbers, and no others."""
    for number, fd in enumerate(fds):
        os.dup2(fd, _HIGH_FD + number)
    os.closerange(_FIRST_FREE_FD, _HIGH_FD)
    for number, target in enumerate(targets):
        os.dup2(_HIGH_FD + number, target)
    os.closerange(_HIGH_FD, _HIGH_FD + len(fds))


def run(start: Start) -> None:
    """Become the process of a `Start`."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NAME, b"python")
    if os.getppid() != start.parent:
        os._exit(1)
    if start.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The fork server's own may be of files that are seekable, and these are pipes.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    tempfile.tempdir = None
    sys.argv = [start.module, *start.arguments]
    _show(start)
    for name in ("legato_engine.failpoints", "legato_service"):  # they read the environment
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if start.module in SERVICES:
        from tests.fork_server import service  # with what no decoder imports

        service.fork_children_of(_own_server())
    if start.module not in CONFINED:
        from tests import stalls

        stalls.begin()
    _end(_run_as_main(start.module))


def _run_as_main(module: str) -> int:
    """Return the exit code."""
    for name in (module, f"{module}.__main__"):
        sys.modules.pop(name, None)  # a module that runs as main is not imported
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - Python itself prints any and exits with 1
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Exit as Python does, but leave the objects: most pages of theirs are still shared."""
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _own_server() -> ForkServer:
    """Fork a fork server of this process's own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, NAME.encode())
        run(serve(theirs))
    theirs.close()
    return ForkServer(ours)


def _show(start: Start) -> None:
    """Let others see the command line of the module."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    words = (sys.executable, "-m", start.module, *start.arguments)
    text = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
