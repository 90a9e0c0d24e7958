"""CUDA C++ to machine code by NVRTC, cached on disk."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources.abc import Traversable
from typing import Any

from legato_engine.errors import InternalError
from legato_engine.kernels.cache import cache_folder, store

_SOURCES = "sources"
_ahead: dict[str, bytes] = {}  # compiled and not taken yet, where the cache may not be writable


def compile_source(
    name: str, defines: Mapping[str, int], arch: str, *, folder: Traversable | None = None
) -> bytes:
    """Compile the file `name` for an `arch` such as sm_90, or read the cache.

    `folder` is by default `sources`. `#include "x"` finds the headers of both; there are no system
    headers.

    Raises:
        InternalError: the source does not compile; the text has the compiler's log.
    """
    texts, options = _texts(folder), _options(defines, arch)
    key = _key(name, texts, options)
    path = cache_folder() / f"{key}.cubin"
    if (ready := _ahead.pop(key, None)) is not None:
        return ready
    if path.is_file():
        return path.read_bytes()
    code = _compile(name, texts, options)
    store(path, code)
    return code


def compile_ahead(
    name: str,
    several: Sequence[Mapping[str, int]],
    arch: str,
    *,
    folder: Traversable | None = None,
) -> None:
    """Compile a file with each of several `defines` side by side, each for the next
    `compile_source` of the same.
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        codes = pool.map(
            lambda defines: compile_source(name, defines, arch, folder=folder), several
        )
        for defines, code in zip(several, codes, strict=True):
            _ahead[_key(name, _texts(folder), _options(defines, arch))] = code


def _texts(folder: Traversable | None) -> dict[str, str]:
    return sources() if folder is None else sources() | _read(folder)


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
    return _read(importlib.resources.files(__package__) / _SOURCES)


def _read(folder: Traversable) -> dict[str, str]:
    sources = (".cu", ".cuh")
    return {file.name: file.read_text() for file in folder.iterdir() if file.name.endswith(sources)}


def _key(name: str, texts: Mapping[str, str], options: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    digest = hashlib.sha256(repr((nvrtc.nvrtcVersion(), name, options)).encode())
    for file, text in sorted(texts.items()):
        digest.update(f"{file}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _compile(name: str, texts: Mapping[str, str], options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    headers = {file: header for file, header in texts.items() if file.endswith(".cuh")}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [header.encode() for header in headers.values()],
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
