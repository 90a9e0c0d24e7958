"""Reading of model files, whose content is untrusted.

What a file makes a parser raise becomes one sentence (`refusing`). A parser that a file can crash,
or keep busy without end, runs in a confined process: `python -m legato_engine.models.untrusted`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from legato_engine import sandbox
from legato_engine.errors import InternalError, InvalidField, LegatoError
from legato_engine.parent_process import bind_to_parent

_CPU_SECONDS = 20.0
_WALL_FACTOR = 30.0
"""Time for each second of CPU time, which even a machine full of other work gives a process."""

_MEMORY = 128 << 20
_MEMORY_PER_BYTE = {"tokenizer": 40, "pickle": 10}
"""Bytes that a parser may take for each byte of its file, about twice what honest files take."""

_CPU_ALLOCATOR = "can't allocate memory"  # in the text of the RuntimeError of torch
_MAX_FILES = 16
_MAX_REASON = 300  # characters
_DONE, _REFUSED = b"\x00", b"\x01"  # before a result, before the reason of a refusal

_PROBE = "".join(map(chr, range(32, 127))) + "a" * 64 + "b\n\té\u4e2d\U0001f600 " * 8
_PICKLED = "lora_state_dict"  # of a published fine-tune
_MAX_TOKENS_PER_BYTE = 8  # of a text: one token is the rule


class FileRefused(Exception):
    """A file cannot be read; the message completes "FILE ..."."""


@contextlib.contextmanager
def refusing(source: str, field: str) -> Iterator[None]:
    """Raise `InvalidField` for what the content of `source` makes a parser raise.

    A panic of a parser in Rust is no `Exception`. Memory that runs out is no fault of a file.
    """
    try:
        yield
    except (LegatoError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except OSError as error:
        problem = f"{source} cannot be read: {error.strerror or reason(error)}"
        raise InvalidField(problem, field=field) from None
    except BaseException as error:
        if is_out_of_memory(error):
            raise
        raise InvalidField(f"{source} cannot be read: {reason(error)}", field=field) from error


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """Raise `InternalError` for what a text makes a tokenizer raise, a panic among it.

    A panic is no `Exception`: past those who handle them it would end the engine.
    """
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise InternalError(f"the tokenizer fails on this text: {reason(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device; torch need not be imported."""
    named = type(error).__name__ == "OutOfMemoryError"
    return named or isinstance(error, MemoryError) or _CPU_ALLOCATOR in str(error)


def reason(error: BaseException) -> str:
    """Return the first line of an error's text after its type."""
    text = " ".join(str(error).partition("\n")[0].split())[:_MAX_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_started: dict[Path, concurrent.futures.Future[None]] = {}


def start_check(path: Path) -> None:
    """Begin the check of a tokenizer.json whose result `check_tokenizer` will return."""
    checked = _started[path] = concurrent.futures.Future[None]()

    def run() -> None:
        try:
            _check_tokenizer(path)
        except BaseException as error:  # noqa: BLE001 - raised again by `check_tokenizer`
            checked.set_exception(error)
        else:
            checked.set_result(None)

    threading.Thread(target=run, name="legato-tokenizer-check", daemon=True).start()


def check_tokenizer(path: Path) -> None:
    """Parse a tokenizer.json and encode a text with it, in a confined process.

    The library aborts its process for some files, and others make a text a million times as long.

    Raises:
        InvalidField: the file crashes its parser, or takes too much time, memory or tokens.
    """
    if (checked := _started.pop(path, None)) is not None:
        checked.result()
    else:
        _check_tokenizer(path)


def _check_tokenizer(path: Path) -> None:
    try:
        with path.open("rb") as file:
            _confined("tokenizer", file, os.fstat(file.fileno()).st_size, max_bytes=1)
    except OSError as error:
        raise InvalidField(f"no tokenizer at {path}: {error.strerror}", field="tokenizer") from None
    except FileRefused as error:
        raise InvalidField(f"{path} {error}", field="tokenizer") from None


def tensors_of_pickle(data: bytes) -> bytes:
    """Return the dict of tensors under `_PICKLED` in a torch checkpoint as safetensors.

    Raises:
        FileRefused: there is no such dict, or unpickling takes too much time or memory.
    """
    with os.fdopen(os.memfd_create("legato-pickle", os.MFD_CLOEXEC), "r+b") as file:
        file.write(data)
        file.seek(0)
        return _confined("pickle", file, len(data), max_bytes=2 * len(data) + (1 << 20))


def _confined(kind: str, file: IO[bytes], size: int, *, max_bytes: int) -> bytes:
    """Return what the process makes of a file of `size` bytes."""
    memory = _MEMORY + _MEMORY_PER_BYTE[kind] * size
    try:
        process = subprocess.Popen(
            (
                *(sys.executable, "-m", "legato_engine.models.untrusted"),
                *(kind, str(memory), str(_CPU_SECONDS), str(os.getpid())),
            ),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # parsers in Rust write their panics there
            env=sandbox.environment(RUST_BACKTRACE="0", TOKENIZERS_PARALLELISM="false"),
        )
    except OSError as error:
        raise InternalError(f"no process can be started: {error.strerror}") from None
    assert process.stdout is not None
    timer = threading.Timer(_CPU_SECONDS * _WALL_FACTOR, process.kill)
    timer.start()
    with process.stdout:
        reply = process.stdout.read(len(_DONE) + max(max_bytes, 4 * _MAX_REASON))
    code = process.wait()
    timer.cancel()
    if code == -signal.SIGPROF:
        raise FileRefused(f"takes more than {_CPU_SECONDS:g} s to be read")
    if reply.startswith(_REFUSED):
        raise FileRefused(reply[1:].decode(errors="replace"))
    if code or not reply.startswith(_DONE):
        raise FileRefused(f"ends the process that reads it (exit code {code})")
    return reply[1:]


def main() -> int:
    """Read the file on standard input, and write what it is to standard output.

    Arguments: the kind (tokenizer or pickle), the parser's bytes of memory and seconds of CPU time,
    the process id of the engine.
    """
    kind, memory, seconds, parent = sys.argv[1:]
    bind_to_parent(int(parent))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    read = _pickle_reader() if kind == "pickle" else _tokenizer_reader()
    used = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(memory),) * 2)
    sandbox.confine(max_files=_MAX_FILES)
    signal.setitimer(signal.ITIMER_PROF, float(seconds))
    try:
        reply = _DONE + read(sys.stdin.buffer.read())
    except FileRefused as error:
        reply = _REFUSED + str(error).encode()[:_MAX_REASON]
    except BaseException as error:  # noqa: BLE001 - a panic is no `Exception`
        too_large = f"takes more than {int(memory) >> 20} MiB to be read"
        said = too_large if is_out_of_memory(error) else f"cannot be read: {reason(error)}"
        reply = _REFUSED + said.encode()
    sys.stdout.buffer.write(reply)
    sys.stdout.buffer.flush()
    os._exit(0)  # no destructor of what a file made runs


def _tokenizer_reader() -> Callable[[bytes], bytes]:
    import tokenizers

    def read(data: bytes) -> bytes:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except BaseException as error:  # noqa: BLE001 - a panic is no `Exception`
            problem = f"a tokenizer: {reason(error)}" if _is_json(data) else "JSON"
            raise FileRefused(f"is not {problem}") from None
        tokenizer.no_truncation()  # as those who use it
        tokenizer.no_padding()
        ids = tokenizer.encode(_PROBE, add_special_tokens=True).ids
        if len(ids) > (limit := _MAX_TOKENS_PER_BYTE * len(_PROBE.encode())):
            raise FileRefused(f"makes over {limit} tokens of a text of {len(_PROBE)} characters")
        return b""

    return read


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _pickle_reader() -> Callable[[bytes], bytes]:
    import torch
    from safetensors import torch as safetensors

    def read(data: bytes) -> bytes:
        # Without `weights_only` a file could run code.
        content: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        found = content.get(_PICKLED) if isinstance(content, dict) else None
        if not isinstance(found, dict):
            raise FileRefused(f"has no {_PICKLED}")
        for name, tensor in found.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise FileRefused(f"has {name!r} in {_PICKLED}, which holds named tensors only")
            if tensor.layout is not torch.strided:
                raise FileRefused(f"has {name} in {_PICKLED}, which is no dense tensor")
        return safetensors.save({name: each.detach().clone() for name, each in found.items()})

    saved = io.BytesIO()  # the first file loads modules, which a confined process cannot
    torch.save({_PICKLED: {"warm": torch.zeros(1, dtype=torch.bfloat16)}}, saved)
    read(saved.getvalue())
    with contextlib.suppress(pickle.UnpicklingError):
        torch.load(io.BytesIO(pickle.dumps(Path())), weights_only=True)
    return read


if __name__ == "__main__":
    sys.exit(main())
