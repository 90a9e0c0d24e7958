"""C++ for this machine's processor to a shared library, by its compiler, cached on disk.

`python -m legato_engine.kernels.cpu.compiler` puts libraries for any such processor beside the
sources, for machines without a compiler.
"""

from __future__ import annotations

import ctypes
import dataclasses
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
_MAIN = "decoder.cpp"
_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True, slots=True)
class _Built:
    """A library that is compiled beforehand, for any processor with some features."""

    file: str
    options: tuple[str, ...]
    needed: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Architecture:
    """Options of all libraries, and of the machine's own; the best of `built` is first."""

    needed: frozenset[str]
    options: tuple[str, ...]
    own: str
    built: tuple[_Built, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {f"avx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "_vnni", "_bf16")}
_X86 = _Architecture(
    _AVX2,
    (),
    "-march=native",
    (
        _Built("any-avx512.so", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _AVX512),
        _Built("any-avx2.so", ("-march=x86-64-v3",), _AVX2),
    ),
)
_ARM64 = _Architecture(
    frozenset(),  # each has NEON
    ("-fno-schedule-insns",),  # GCC's spills sums that fit into registers; Clang has none
    "-mcpu=native",  # Apple's Clang knows no -march=native
    (
        _Built("any-dotprod.so", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
        _Built("any-neon.so", ("-march=armv8-a",), frozenset()),
    ),
)
_ARCHITECTURES = {"x86_64": _X86, "aarch64": _ARM64, "arm64": _ARM64}


class CannotCompileError(Exception):
    """There can be no library here; the text is a reason that follows "because"."""


def library_path() -> pathlib.Path:
    """Find the library in the cache, or compile it there; else the one beside the sources.

    Raises:
        CannotCompileError: the processor or the compiler cannot.
    """
    architecture, flags = _architecture(), _processor().flags
    if missing := architecture.needed - flags:
        names = ", ".join(sorted(missing))
        raise CannotCompileError(f"the processor lacks {names}")
    try:
        compiler = _compiler()
    except CannotCompileError:
        for built in architecture.built:
            if built.needed <= flags and _beside(built).is_file():
                return _beside(built)
        raise
    options = (*_FLAGS, *architecture.options, architecture.own)
    texts = sources()
    path = cache_folder() / f"{_key(compiler, options, texts)}.so"
    if not path.is_file():
        store(path, _compile(compiler, options, texts))
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


def instructions_of(library: ctypes.CDLL) -> str:
    told = library.legato_instructions
    told.restype, told.argtypes = ctypes.c_char_p, ()
    name: bytes = told()
    return name.decode()


def build_for_any() -> None:
    """Put libraries for any processor of this architecture that is supported beside the sources.

    Raises:
        CannotCompileError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    architecture = _architecture()
    for built in architecture.built:
        options = (*_FLAGS, *architecture.options, *built.options)
        _beside(built).write_bytes(_compile(_compiler(), options, sources()))


def _beside(built: _Built) -> pathlib.Path:
    return pathlib.Path(str(_folder() / built.file))


def _architecture() -> _Architecture:
    name = platform.machine()
    if name not in _ARCHITECTURES:
        raise CannotCompileError(f"there are none for {name}")
    return _ARCHITECTURES[name]


def _folder() -> Traversable:
    return importlib.resources.files(__package__) / "sources"


@dataclasses.dataclass(frozen=True, slots=True)
class _Processor:
    model: str
    flags: frozenset[str]


_MODEL = (
    *("vendor_id", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU variant", "CPU part", "CPU revision"),
)
_FEATURES = ("flags", "Features")
"""Fields of x86 and of arm64 in /proc/cpuinfo."""


@functools.cache
def _processor() -> _Processor:
    """Read the first processor's fields under Linux; elsewhere it has no flags."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return _Processor(platform.processor(), frozenset())
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return _Processor(
        " ".join(fields.get(name, "") for name in _MODEL),
        frozenset(" ".join(fields.get(name, "") for name in _FEATURES).split()),
    )


def _compiler() -> str:
    wanted = os.environ.get("CXX", "").strip()
    for name in (wanted, *_COMPILERS) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotCompileError(f"there is no C++ compiler ({', '.join(_COMPILERS)} or $CXX)")


def _key(compiler: str, options: tuple[str, ...], texts: Mapping[str, str]) -> str:
    """All that the library depends on: sources, options, compiler, processor."""
    version = _run([compiler, "--version"]).stdout
    processor = _processor()
    parts = (compiler, version, options, processor.model, sorted(processor.flags))
    digest = hashlib.sha256(repr(parts).encode())
    for file, text in sorted(texts.items()):
        digest.update(f"{file}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _compile(compiler: str, options: tuple[str, ...], texts: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="legato-kernels-") as name:
        folder = pathlib.Path(name)
        for file, text in texts.items():
            (folder / file).write_text(text)
        library = folder / "kernels.so"
        _run([compiler, *options, "-o", str(library), str(folder / _MAIN)])
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
