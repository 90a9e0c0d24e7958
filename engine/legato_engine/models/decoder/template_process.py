"""Renders chat templates in a process of their own, which bounds what a hostile one can do."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato_engine import sandbox
from legato_engine.errors import InternalError

_CHILD = Path(__file__).with_name("template_child.py")
_START_SECONDS = 120.0  # to load the libraries
_REPLY_SECONDS = 10.0  # for the child, whose own limit is of processor time
_MAX_REPLY = 256 << 20  # bytes, the memory that a template may take
_READ_BYTES = 1 << 20

Message = dict[str, Any]
"""A role and its content: a text, or parts of several types."""


class TemplateRefused(Exception):
    """A template failed, or exceeded a limit; the message is for the operator."""


class TemplateProcess:
    """One process for all templates; thread-safe. It starts with `start` or the first one.

    It ends with this process, however that ends: its input is closed then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start the process, and return before it has loaded its libraries, which takes seconds."""
        with self._lock:
            self._started()

    def close_unused(self) -> None:
        """End the process if it was started and nothing has been rendered."""
        with self._lock:
            if not self._is_ready:
                self._end()

    def render(
        self, template: str, variables: Mapping[str, str], messages: Sequence[Message]
    ) -> str:
        """Render a conversation.

        Raises:
            TemplateRefused: the template fails, or takes too much time, memory or text.
            InternalError: the process cannot be started.
        """
        request = {"template": template, "variables": dict(variables), "messages": list(messages)}
        line = msgspec.json.encode(request) + b"\n"
        with self._lock:
            child = self._running()
            try:
                assert child.stdin is not None
                child.stdin.write(line)
                child.stdin.flush()
                reply = _receive(child, _REPLY_SECONDS)
            except OSError as error:
                self._end()
                raise TemplateRefused(f"the process that renders it ended: {error}") from None
        if "text" not in reply:
            raise TemplateRefused(reply["refused"])
        return str(reply["text"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=sandbox.environment(HF_HUB_OFFLINE="1"),
                start_new_session=True,  # an interrupt of the terminal is for the server
            )
        return self._child

    def _running(self) -> subprocess.Popen[bytes]:
        child = self._started()
        if not self._is_ready:
            try:
                _receive(child, _START_SECONDS)
            except OSError:
                self._end()
                raise InternalError(
                    "the process that renders chat templates did not start"
                ) from None
            self._is_ready = True
        return child

    def _end(self) -> None:
        child, self._child, self._is_ready = self._child, None, False
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with its worker
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a request that it never read
                    pipe.close()
        child.wait()


def _receive(child: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """Receive a message. Raises OSError without a whole one in time and of `_MAX_REPLY`."""
    assert child.stdout is not None
    file, line, end = child.stdout.fileno(), bytearray(), time.monotonic() + seconds
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while not line.endswith(b"\n"):
        in_time = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        part = os.read(file, _READ_BYTES) if in_time and len(line) <= _MAX_REPLY else b""
        if not part:
            raise OSError(f"it died, or did not reply within {seconds:g} s")
        line += part
    reply: dict[str, Any] = json.loads(line)
    return reply


templates = TemplateProcess()
"""Of this process."""

atexit.register(templates.close)
