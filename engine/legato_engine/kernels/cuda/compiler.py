"""CUDA C++ to machine code, once per machine: NVRTC, and a cache of what it made."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from legato_engine.errors import InternalError

_SOURCES = "sources"


def compile_source(name: str, defines: Mapping[str, int], arch: str) -> bytes:
    """Machine code of `sources/<name>` for an `arch` such as sm_90, from the cache if it is there.

    `#include "x"` finds the other files in `sources`; there are no system headers. Raises
    `InternalError` with the compiler's log.
    """
    options = _options(defines, arch)
    path = cache_folder() / f"{_key(name, options)}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(name, options)
    _store(path, code)
    return code


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept: `LEGATO_KERNEL_CACHE`, else below the user's cache."""
    if folder := os.environ.get("LEGATO_KERNEL_CACHE"):
        return pathlib.Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "legato" / "kernels"


def _options(defines: Mapping[str, int], arch: str) -> tuple[str, ...]:
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--extra-device-vectorization",
        *(f"-D{key}={value}" for key, value in sorted(defines.items())),
    )


@functools.cache
def sources() -> dict[str, str]:
    """The texts in `sources`, by file name."""
    folder = importlib.resources.files(__package__) / _SOURCES
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


def _key(name: str, options: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    digest = hashlib.sha256(repr((nvrtc.nvrtcVersion(), name, options)).encode())
    for file, text in sorted(sources().items()):
        digest.update(f"{file}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _compile(name: str, options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    texts = sources()
    headers = {file: text for file, text in texts.items() if file.endswith(".cuh")}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [file.encode() for file in headers],
        )
    )
    encoded = [option.encode() for option in options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise InternalError(f"{name} does not compile: {log.decode().strip()}")
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import nvrtc

    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InternalError(f"NVRTC: {result.name}")
    return values[0] if values else None


def _store(path: pathlib.Path, code: bytes) -> None:
    """The file appears complete or not at all; a cache that cannot be written is no failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        pathlib.Path(file.name).replace(path)
    except OSError:
        return
