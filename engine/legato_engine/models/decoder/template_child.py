"""The process that renders chat templates, run as a file by `template_process`.

It forks a worker that renders, and another one when that is killed by a limit. The worker is
confined (`sandbox`) and may take little memory, because a template is an untrusted program:
jinja's sandbox keeps it from Python's internals, but bounds neither its time nor its memory.

A message is a line of JSON, and none is sent before the last one has its reply.
"""

import gc
import json
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from legato_engine import sandbox

CPU_SECONDS = 0.5
MEMORY_BYTES = 256 << 20
MAX_CHARACTERS = 4 << 20

_MAX_MESSAGE = 500  # characters of a template's own error
_RENDERING = b"\x01"

Render = Callable[..., Any]


def _send(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    gc.disable()  # collections would walk over all that is imported, again and again
    from transformers.utils.chat_template_utils import render_jinja_template

    _warm_up(render_jinja_template)
    gc.freeze()  # else a worker's collections would copy what it shares with this process
    gc.enable()
    rendering = mmap.mmap(-1, 1)  # shared with the workers: whether a request is in work
    _send({"ready": True})
    while True:
        worker = os.fork()
        if worker == 0:
            _limit()
            _work(render_jinja_template, rendering)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        if rendering[:1] == _RENDERING:
            rendering[:1] = b"\x00"
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            reason = f"it takes more than {CPU_SECONDS:g} s of processor time"
            _send({"refused": reason if killed else "it ends the process that renders it"})
        elif os.WIFEXITED(status):
            sys.exit(1)  # it cannot begin, and neither could the next one


def _warm_up(render: Render) -> None:
    """Load whatever is loaded at the first use: a worker cannot."""
    for template in ("{{ messages | tojson }}{{ strftime_now('%Y') }}", "{{ raise_exception(1) }}"):
        _render(render, {"template": template, "messages": [], "variables": {}})
    time.localtime()


def _limit() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + MEMORY_BYTES
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sandbox.confine(max_files=3)


def _work(render: Render, rendering: mmap.mmap) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for request in map(json.loads, sys.stdin.buffer):
        rendering[:1] = _RENDERING
        # Without a handler the signal ends the process, also within one long operation.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = _render(render, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(reply)
        rendering[:1] = b"\x00"


def _render(render: Render, request: Any) -> dict[str, str]:
    import jinja2

    try:
        texts, _ = render(
            [request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            enable_thinking=False,
            **request["variables"],
        )
    except jinja2.TemplateError as error:
        return {"refused": str(error)[:_MAX_MESSAGE]}
    except MemoryError:
        return {"refused": f"it takes more than {MEMORY_BYTES >> 20} MiB"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return {"refused": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]}
    text = texts[0]
    if len(text) > MAX_CHARACTERS:
        return {"refused": f"it makes more than {MAX_CHARACTERS} characters"}
    return {"text": text}


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    main()
