"""A confined process keeps its descriptors and its memory, and reaches nothing else."""

import os
import platform
import subprocess
import sys

import pytest
from legato_engine import sandbox
from legato_engine.sandbox import confine

CONFINED = """
import ctypes, mmap, os, resource, signal, socket, sys, threading
from legato_engine import sandbox
shared, tasks = mmap.mmap(-1, 4096), os.open("/proc/self/task", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
problem = sandbox.confine(max_files=16)
assert not problem, problem

def checked(result):
    if result in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "refused")

libc.mmap.restype = ctypes.c_void_p
ATTEMPTS = {
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "create": lambda: os.open("/tmp/legato-sandbox", os.O_WRONLY | os.O_CREAT),
    "list": lambda: os.listdir(tasks),
    "stat": lambda: os.stat("/etc/passwd"),
    "unlink": lambda: os.unlink("/nothing"),
    "socket": socket.socket,
    "socketpair": socket.socketpair,
    "execve": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "thread": lambda: threading.Thread(target=print).start(),
    "kill": lambda: os.kill(os.getppid(), 0),
    "pidfd": lambda: os.pidfd_open(os.getpid()),
    "ptrace": lambda: checked(libc.ptrace(16, os.getppid(), 0, 0)),
    "read of memory": lambda: checked(libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)),
    "limits of others": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE),
    "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "memory made executable": lambda: checked(libc.mprotect(0, 4096, 4)),
    "more files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "dup2": lambda: os.dup2(1, 9),
    "ioctl": lambda: os.get_terminal_size(1),
    "prctl": lambda: checked(libc.prctl(4, 1, 0, 0, 0)),
    "io_uring": lambda: checked(libc.syscall(425, 1, 0)),
    "sendmsg": lambda: checked(libc.sendmsg(1, 0, 0)),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
    except (OSError, RuntimeError, ValueError) as error:
        print(name, getattr(error, "errno", None) or "EPERM")
    else:
        print(name, "passed")
shared[:5] = bytes(bytearray(b"bytes"))
resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, resource.getrlimit(resource.RLIMIT_DATA)[1]))
try:
    bytearray(1 << 30)
except MemoryError:
    print("and works")
"""


@pytest.mark.skipif(
    platform.machine() not in sandbox._MACHINES, reason="the filter is for other architectures"
)
def test_what_a_file_does_not_need_is_refused():
    """Whatever is tried, the kernel answers EPERM; memory and open files can be used."""
    done = subprocess.run(
        [sys.executable, "-c", CONFINED],
        env=sandbox.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    *tried, last = done.stdout.splitlines()
    assert last == "and works", done.stderr
    assert len(tried) == CONFINED.count('    "')
    assert not [line for line in tried if line.rpartition(" ")[2] not in ("1", "EPERM")]


def test_secrets_are_not_inherited(monkeypatch):
    """The environment is a list of names, not what is left of the server's."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy")
    monkeypatch.setenv("TZ", "UTC")
    given = sandbox.environment(OWN="value")
    assert "secret" not in "".join(given.values())
    assert given["TZ"] == "UTC"
    assert given["OWN"] == "value"
    own = {"PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OWN"}
    assert set(given) <= {*sandbox._KEPT_VARIABLES, *own}
    monkeypatch.delenv("TZ")
    assert sandbox.environment()["TZ"] == ":/etc/localtime"


def test_an_architecture_without_a_filter_says_so():
    """Limits of resources hold there; nothing fails."""
    pid = os.fork()
    if pid == 0:
        platform.machine = lambda: "riscv64"
        os._exit(0 if "riscv64" in confine(max_files=16) else 1)
    assert os.waitpid(pid, 0)[1] == 0
