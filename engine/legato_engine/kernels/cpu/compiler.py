"""C++ for this machine's processor to a shared library, by its compiler, cached on disk.

`python -m legato_engine.kernels.cpu.compiler` puts one for any processor with AVX2 beside the
sources, for machines without a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources.abc import Traversable

from legato_engine.kernels.cache import cache_folder, store

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    "-ffp-contract=off",  # a row's bits must not depend on what the compiler fuses where
)
_NEEDED = frozenset({"avx2", "fma", "f16c"})
_OWN, _ANY = "native", "x86-64-v3"
"""Processors to compile for."""

_MAIN = "decoder.cpp"
_BUILT = "any-avx2.so"
_TIMEOUT_S = 300


class CannotCompileError(Exception):
    """There can be no library here; the text is a reason that follows "because"."""


def library_path() -> pathlib.Path:
    """Find the library in the cache, or compile it there; else the one beside the sources.

    Raises:
        CannotCompileError: the processor or the compiler cannot.
    """
    if missing := _NEEDED - _processor().flags:
        names = ", ".join(sorted(missing))
        raise CannotCompileError(f"the processor lacks {names}")
    built = pathlib.Path(str(_folder() / _BUILT))
    try:
        compiler = _compiler()
    except CannotCompileError:
        if built.is_file():
            return built
        raise
    texts = sources()
    path = cache_folder() / f"{_key(compiler, texts)}.so"
    if not path.is_file():
        store(path, _compile(compiler, texts, _OWN))
    if not path.is_file():
        raise CannotCompileError(f"the folder {path.parent} cannot be written")
    return path


@functools.cache
def sources() -> dict[str, str]:
    return {
        file.name: file.read_text()
        for file in _folder().iterdir()
        if file.name.endswith((".cpp", ".h"))
    }


def build_for_any() -> None:
    """Put a library for any processor that is supported beside the sources.

    Raises:
        CannotCompileError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    code = _compile(_compiler(), sources(), _ANY)
    pathlib.Path(str(_folder() / _BUILT)).write_bytes(code)


def _folder() -> Traversable:
    return importlib.resources.files(__package__) / "sources"


class _Processor:
    def __init__(self, model: str, flags: frozenset[str]) -> None:
        self.model = model
        self.flags = flags


@functools.cache
def _processor() -> _Processor:
    """Of x86 under Linux; elsewhere it has no flags."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return _Processor(platform.processor(), frozenset())
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return _Processor(
        " ".join(fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping")),
        frozenset(fields.get("flags", "").split()),
    )


def _compiler() -> str:
    wanted = os.environ.get("CXX", "").strip()
    for name in (wanted, *_COMPILERS) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotCompileError(f"there is no C++ compiler ({', '.join(_COMPILERS)} or $CXX)")


def _key(compiler: str, texts: Mapping[str, str]) -> str:
    """All that the library depends on: sources, options, compiler, processor."""
    version = _run([compiler, "--version"]).stdout
    processor = _processor()
    parts = (compiler, version, _FLAGS, processor.model, sorted(processor.flags))
    digest = hashlib.sha256(repr(parts).encode())
    for file, text in sorted(texts.items()):
        digest.update(f"{file}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _compile(compiler: str, texts: Mapping[str, str], processor: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="legato-kernels-") as name:
        folder = pathlib.Path(name)
        for file, text in texts.items():
            (folder / file).write_text(text)
        library = folder / "kernels.so"
        _run([compiler, *_FLAGS, f"-march={processor}", "-o", str(library), str(folder / _MAIN)])
        return library.read_bytes()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, check=True, text=True, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [
            "no reason given"
        ]
        raise CannotCompileError(f"{command[0]} failed: {lines[0].strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompileError(f"{command[0]} failed: {error}") from None


if __name__ == "__main__":
    build_for_any()
