"""Confinement of child processes that read untrusted files.

Such a process gets an environment without the server's secrets, loads its libraries, and then gives
up whatever the files need not: it opens nothing, starts nothing, connects to nothing and makes no
memory executable. What it may use are the descriptors that it has.

The system calls are an allow list, because a deny list lets calls pass that a later kernel adds.
A refused call fails with EPERM instead of ending the process: libraries have ways around most of
them, as glibc has where it cannot ask for the number of processors.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ")
_SYSTEM_TIME_ZONE = ":/etc/localtime"
"""Without a name the C library would look at that file again and again, which it cannot later."""

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILTER_MODE = 2
_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM = 1

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in `struct seccomp_data`

_PROT_EXEC = 4
_F_DUPFD_CLOEXEC = 1030
_AT_EMPTY_PATH = 0x1000


class _Machine(NamedTuple):
    """The kernel's name of an architecture, and which column of `_CALLS` is its own."""

    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}

_CALLS: Mapping[str, tuple[int | None, int | None]] = {
    # Descriptors that are open.
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "poll": (7, None),
    "ppoll": (271, 73),
    # Memory.
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    # Time, signals and locks of this process.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "setitimer": (38, 103),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "restart_syscall": (219, 128),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    # Its own limits and identity.
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # With a condition of `_CONDITIONS`.
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "fcntl": (72, 25),
    "newfstatat": (262, 79),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}
"""Numbers of the system calls that are allowed, on x86_64 and on aarch64."""


class _Condition(NamedTuple):
    """Condition on an argument's lower half: one of `values`, or without the bits `never`."""

    argument: int
    values: tuple[int, ...] = ()
    never: int = 0


def environment(**more: str) -> dict[str, str]:
    """Return what a confined child needs: no token, key or proxy of this process's environment.

    It finds packages where this process does. Idle threads of libraries cost memory, and a process
    with threads cannot be confined.
    """
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"TZ": _SYSTEM_TIME_ZONE, **kept, "PYTHONPATH": paths}
    return {**own, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **more}


def confine(*, max_files: int) -> str:
    """Confine this process, which has one thread, for good; return what the kernel refuses.

    It keeps its descriptors, and may have new ones below `max_files` that duplicate them. Limits of
    memory and time are the caller's. The result is empty unless there is no filter of system calls,
    for this kernel, architecture or process; the limits of resources hold there, too.
    """
    num_threads = len(os.listdir("/proc/self/task"))
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: max_files,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bound, bound))
    if num_threads > 1:
        return f"of {num_threads} threads only one could be confined"
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        return f"no filter of system calls is implemented for {platform.machine()}"
    program = b"".join(_program(machine))
    code = ctypes.create_string_buffer(program, len(program))
    # `struct sock_fprog`: the number of instructions, and where they are.
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(header), 0, 0),
    ):
        if libc.prctl(*(ctypes.c_ulong(each) for each in arguments)):
            reason = os.strerror(ctypes.get_errno())
            return f"this kernel takes no filter of system calls: {reason}"
    return ""


def _conditions() -> Mapping[str, _Condition]:
    own = (os.getpid(),)
    return {
        "mmap": _Condition(2, never=_PROT_EXEC),
        "mprotect": _Condition(2, never=_PROT_EXEC),
        "fcntl": _Condition(1, values=(_F_DUPFD_CLOEXEC,)),
        "newfstatat": _Condition(3, values=(_AT_EMPTY_PATH,)),  # `fstat` of older C libraries
        "kill": _Condition(0, values=own),
        "tgkill": _Condition(0, values=own),
        "prlimit64": _Condition(0, values=(0, *own)),
    }


def _program(machine: _Machine) -> Iterator[bytes]:
    """Yield the instructions; on x86_64 numbers of the x32 interface match none and are refused."""
    refuse = _instruction(_RETURN, _ERRNO | _EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    yield _instruction(_LOAD, _ARCHITECTURE_AT)
    yield _instruction(_JUMP_EQUAL, machine.audit, if_true=1)
    yield _instruction(_RETURN, _KILL_PROCESS)
    yield _instruction(_LOAD, _NUMBER_AT)
    conditions = _conditions()
    for name, numbers in _CALLS.items():
        number = numbers[machine.column]
        if number is None:
            continue
        body = [allow]
        if (condition := conditions.get(name)) is not None:
            body = [_instruction(_LOAD, _ARGUMENTS_AT + 8 * condition.argument)]
            if condition.never:
                body += [_instruction(_JUMP_ANY_BIT, condition.never, if_true=1), allow]
            for value in condition.values:
                body += [_instruction(_JUMP_EQUAL, value, if_false=1), allow]
            body.append(refuse)
        yield _instruction(_JUMP_EQUAL, number, if_false=len(body))
        yield from body
    yield refuse


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`; jumps are in instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
