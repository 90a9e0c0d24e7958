"""`subprocess` as tests see it: a server's or engine's command is forked instead of executed."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DECODER = "legato_engine.images.decoding_worker"
READER = "legato_engine.models.untrusted"
CONFINED = (DECODER, READER)
"""They are started without most variables; nothing that they import reads those."""

SMALL = frozenset({DECODER, "tests.engine.client.fake_engine"})
"""They do without most of what the others import, so that their process is a tenth of theirs."""

FORKED = frozenset(
    {
        DECODER,
        READER,
        "legato_engine.core.process",
        "legato_service",
        "legato_service.workers.worker",
        "tests.e2e.quick_service",
        "tests.e2e.victim",
        "tests.engine.client.fake_engine",
        "tests.faults.attacks",
        "tests.service.fake_process",
        "tests.service.fake_service",
        "tests.service.fakes",
    }
)
"""Modules whose commands may be forked."""

HEAVY = frozenset({"bench", "quantize", "trace"})
"""Commands of `legato` that may be forked, as they import torch."""

_OWN_VARIABLES = (
    *("LEGATO_", "PYTEST_", "TMPDIR", "XDG_", "PYTHONPATH", "OPENBLAS_", "OMP_", "TZ"),
    *("RUST_BACKTRACE", "TOKENIZERS_PARALLELISM"),
)
"""What a forked process reads itself; all other variables are those of the fork server."""

_execute: Any = vars(subprocess.Popen)["_execute_child"]


class ForkingStarts:
    """Replaces `subprocess`'s execution in this process while `active`."""

    def __init__(self) -> None:
        self.active = True
        self._environment = dict(os.environ)
        self._folders = frozenset(path for path in sys.path if path)
        self._servers: dict[str, ForkServer] = {}
        self._lock = threading.Lock()
        popen: Any = subprocess.Popen
        popen._execute_child = functools.partialmethod(_start, self)

    def server(self, module: str) -> ForkServer:
        """The fork server of a module, from the first use on."""
        imported = "little" if module in SMALL else "all"
        with self._lock:
            if imported not in self._servers:
                path = os.pathsep.join(path for path in sys.path if path)
                environment = {**self._environment, "PYTHONPATH": path}
                self._servers[imported] = ForkServer.begin(environment, imported)
            return self._servers[imported]

    def can_fork(self, command: object, environment: Mapping[str, str]) -> bool:
        """Whether a forked process is what the command would be."""
        if not self.active or isinstance(command, str | bytes) or not isinstance(command, Sequence):
            return False
        words = [str(word) for word in command]
        if len(words) < 3 or words[:2] != [sys.executable, "-m"]:
            return False
        module, *arguments = _module_and_arguments(words)
        is_heavy = module == "legato_client.cli" and bool(HEAVY & set(arguments[:1]))
        if module not in FORKED and not is_heavy:
            return False
        return self._has_environment(module, environment) and _has_policy(words)

    def _has_environment(self, module: str, environment: Mapping[str, str]) -> bool:
        changed = set(environment.items()) - set(self._environment.items())
        if module not in CONFINED:
            changed |= set(self._environment.items()) - set(environment.items())
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        return all(name.startswith(_OWN_VARIABLES) for name, _ in changed) and all(
            path in self._folders for path in paths if path
        )


def _module_and_arguments(words: Sequence[str]) -> list[str]:
    """`legato serve` executes the service, so its process is that of the service."""
    serve = list(words[2:4]) == ["legato_client.cli", "serve"]
    return ["legato_service", *words[4:]] if serve else list(words[2:])


def _has_policy(words: Sequence[str]) -> bool:
    """What the policy sets is read by gRPC when it is imported."""
    option = "--latency-policy"
    if option not in words:
        return not any(word.startswith(option) for word in words)
    return words[words.index(option) + 1] == "auto"


def _start(process: Any, starts: ForkingStarts, args: Any, *rest: Any) -> None:
    """As `Popen._execute_child`."""
    names = (
        *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo"),
        *("creationflags", "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite"),
        *("errread", "errwrite", "restore_signals", "gid", "gids", "uid", "umask"),
        *("start_new_session", "process_group"),
    )
    given = dict(zip(names, rest, strict=True))
    environment = os.environ if given["env"] is None else given["env"]
    unusual = ("executable", "preexec_fn", "shell")
    if any(given[name] for name in unusual) or not starts.can_fork(args, environment):
        _execute(process, args, *rest)
        return
    ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    fds = {number: number if end == -1 else end for number, end in enumerate(ends)}
    fds |= {number: number for number in given["pass_fds"]}
    module, *arguments = _module_and_arguments([str(word) for word in args])
    process.pid = starts.server(module).start(
        module,
        arguments,
        environment,
        fds,
        folder=given["cwd"] or ".",
        new_session=given["start_new_session"],
    )
    process._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))


MAX_MESSAGE = 200_000  # bytes; a sequenced packet's is limited
NAME = "fork server"
"""Of the process that forks others, as the kernel shows it."""

_PADDING = " " * 16_384
_PR_SET_CHILD_SUBREAPER = 36


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A process to fork; the files with the numbers `fds` come with the message."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]
    parent: int
    new_session: bool


class ForkServer:
    """Starts processes that become children of this one."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, environment: Mapping[str, str], imported: str) -> ForkServer:
        """Start a fork server, which imports what is named so; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = (str(theirs.fileno()), imported, _PADDING)
            subprocess.Popen(
                (sys.executable, "-m", "tests.fork_server", *arguments),
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        return cls(ours)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Mapping[int, int],
        *,
        folder: str = ".",
        new_session: bool = False,
    ) -> int:
        """Run a module in a process with these files and no others; return its id.

        `fds` maps the numbers of the files there to those here.
        """
        start = Start(
            module=module,
            arguments=list(arguments),
            environment=dict(environment),
            folder=os.path.abspath(folder),
            fds=list(fds),
            parent=os.getpid(),
            new_session=new_session,
        )
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [msgspec.json.encode(start)], list(fds.values()))
                return int(self._channel.recv(32))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)


def prctl(operation: int, value: int | bytes) -> None:
    """As the kernel's of this name."""
    failed = ctypes.CDLL(None).prctl(operation, value, 0, 0, 0)
    assert not failed, f"this kernel does not know the operation {operation}"
