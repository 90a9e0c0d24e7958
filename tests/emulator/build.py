"""CUDA sources compiled by a C++ compiler, each once per machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable

_HERE = pathlib.Path(__file__).parent
_HOST_FILES = (
    *(_HERE / name for name in ("machine.h", "machine.cpp", "cuda_host.h", "ptx.cuh")),
    *sorted((_HERE / "machine").glob("*.*")),
)
FLAGS = (
    *("-std=c++17", "-fPIC", "-g1", "-w", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-ffp-contract=off"),  # as nvcc reads casts; bits by any compiler
)
CHECKS = (
    "-fsanitize=bounds,alignment,null,shift,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
)
SANITIZERS = "LEGATO_EMULATOR_SANITIZERS"
"""Set in a process that has the sanitizers' libraries (test_sanitizers.py)."""
_SANITIZED = (
    ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
    if os.environ.get(SANITIZERS)
    else ()
)
_NESTED = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_KERNEL = re.compile(rf'extern "C" __global__ void\s*(?:__launch_bounds__\({_NESTED}\))?\s*(\w+)\(')
_DYNAMIC = re.compile(
    r"^( *)extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];", re.MULTILINE
)

Patch = tuple[str, str, str]
"""A file, a text that occurs in it once, and another in its place."""


def compiler() -> str | None:
    """The machine's own."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next((name for name in names if shutil.which(name)), None)


def compiled(
    name: str,
    defines: Mapping[str, int],
    folder: Traversable | None,
    patches: Sequence[Patch] = (),
) -> pathlib.Path:
    """The library of a source, from the cache if nothing has changed.

    `folder` has the source, beside those of `kernels.cuda`; `patches` change them first.
    """
    texts = sources(name, folder, patches)
    constants = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    key = _key(name, *constants, *(f"{file}\0{text}" for file, text in sorted(texts.items())))
    path = _cache() / f"{name.removesuffix('.cu')}-{key}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory() as build:
            at = pathlib.Path(build)
            for file, text in texts.items():
                (at / file).write_text(text)
            level = "-O0" if patches else "-O1"  # the former compiles in half the time
            source = ("-x", "c++", str(at / name), "-x", "none", str(_machine()), "-ldl")
            checks = _SANITIZED or CHECKS
            _run(*FLAGS, *checks, level, f"-I{_HERE}", *constants, "-shared", *source, to=path)
    return path


def sources(name: str, folder: Traversable | None, patches: Sequence[Patch] = ()) -> dict[str, str]:
    """What is compiled for the source of this name: all texts, by their files."""
    texts = _texts(folder)
    for file, old, new in patches:
        count = texts[file].count(old)
        assert count == 1, f"{file} has {count} times: {old}"
        texts[file] = texts[file].replace(old, new)
    texts[name] = '#include "cuda_host.h"\n#line 1\n' + _with_entries(texts[name])
    return {file: _DYNAMIC.sub(_dynamic, text) for file, text in texts.items()}


def _with_entries(text: str) -> str:
    """Each kernel's follows it: not all are compiled with the same constants."""
    parts, at = list[str](), 0
    for kernel in _KERNEL.finditer(text):
        end = text.index("\n}\n", kernel.end()) + 2
        parts += [text[at:end], f" EMULATED_KERNEL({kernel[1]})"]
        at = end
    return "".join((*parts, text[at:]))


def _dynamic(match: re.Match[str]) -> str:
    """A running block's; one that is declared outside of functions is asked for at every use."""
    bytes_of_block = "static_cast<unsigned char*>(emulator::dynamic_memory())"
    if match[1]:
        return f"{match[1]}auto* const {match[2]} = {bytes_of_block};"
    asked = f"operator unsigned char*() const {{ return {bytes_of_block}; }}"
    return f"constexpr struct {{ {asked} }} {match[2]};"


def _texts(folder: Traversable | None) -> dict[str, str]:
    """All sources but the one that the host has its own of."""
    folders = [importlib.resources.files("legato_engine.kernels.cuda") / "sources"]
    folders += [] if folder is None else [folder]
    files = [file for each in folders for file in each.iterdir()]
    sources = [file for file in files if file.name.endswith((".cu", ".cuh"))]
    return {file.name: file.read_text() for file in sources if file.name != "ptx.cuh"}


@functools.cache
def _machine() -> pathlib.Path:
    """The scheduler's object file."""
    path = _cache() / f"machine-{_key()}.o"
    if not path.is_file():
        _run(*FLAGS, *_SANITIZED, "-O2", "-c", str(_HERE / "machine.cpp"), to=path)
    return path


def _key(*of: str) -> str:
    digest = hashlib.sha256(repr((_version(), FLAGS, CHECKS, _SANITIZED, of)).encode())
    for file in _HOST_FILES:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


@functools.cache
def _version() -> str:
    name = compiler()
    assert name is not None, "there is no C++ compiler"
    asked = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()[0]


def _cache() -> pathlib.Path:
    folder = pathlib.Path(tempfile.gettempdir()) / f"legato-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _run(*arguments: str, to: pathlib.Path) -> None:
    """Compile into a file that appears whole."""
    name = compiler()
    assert name is not None, "there is no C++ compiler"
    part = to.with_suffix(f".{os.getpid()}{to.suffix}")
    command = [name, *arguments, "-o", str(part)]
    own = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert ran.returncode == 0, f"{to.name} does not compile:\n{ran.stderr[:8000]}"
    part.replace(to)
