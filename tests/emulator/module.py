"""CUDA sources compiled for the host, and launched with every thread as a fiber of this one.

`EmulatedModule` takes the place of `kernels.cuda.module.Module` where tensors are on a CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.resources
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable

import torch
from legato_engine.kernels.cuda.module import Argument

_HERE = pathlib.Path(__file__).parent
_HOST_FILES = ("machine.h", "machine.cpp", "cuda_host.h", "ptx.cuh")
_FLAGS = ("-std=c++17", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off")
_FLAGS += ("-fvisibility=hidden", "-g1")
_KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];")
_MESSAGE_BYTES = 16384

Patch = tuple[str, str, str]
"""A file, a text that occurs in it once, and another in its place."""


class EmulatedFault(Exception):
    """What threads of a launch did that no GPU allows, or a deadlock."""


class _Launch(ctypes.Structure):
    """`Launch` of machine.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("most_turns", ctypes.c_uint64),
        ("patient", ctypes.c_uint),
        ("host_every", ctypes.c_uint),
        ("host", ctypes.CFUNCTYPE(None)),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_size_t),
        ("turns", ctypes.c_uint64),
    )


@dataclasses.dataclass
class Schedule:
    """How launches run: in an order drawn by `seed`, of which each launch has its own.

    `patient`: where nothing goes on but waits, time does, so that waits give up; else it is a
    fault. `host` is called every so many turns.
    """

    seed: int = 1
    patient: bool = False
    most_turns: int = 2_000_000_000
    host: Callable[[], None] | None = None
    host_every: int = 1000
    turns: int = 0
    """Of the last launch."""


class EmulatedModule:
    """A source compiled for the host, with constants `defines`."""

    can_overlap = False

    def __init__(
        self,
        name: str,
        defines: Mapping[str, int],
        *,
        own: bool = False,
        folder: Traversable | None = None,
        schedule: Schedule | None = None,
        patches: Sequence[Patch] = (),
    ) -> None:
        """`folder` as `Module` has it; `patches` change the sources first."""
        self._library = ctypes.CDLL(str(_compiled(name, defines, folder, tuple(patches))))
        self._schedule = schedule or Schedule()

    def kernel(self, name: str, *, shared: int = 0) -> EmulatedKernel:
        function = getattr(self._library, f"emulate_{name}")
        return EmulatedKernel(function, shared, self._schedule)


class EmulatedKernel:
    """One kernel, whose launches are over when `launch` returns."""

    def __init__(self, function: Callable[..., int], shared: int, schedule: Schedule) -> None:
        self._function, self._shared, self._schedule = function, shared, schedule

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int | None = None,
        cluster: int = 1,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Raises EmulatedFault."""
        how = self._schedule
        values = [_parameter(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        host = how.host if how.host is not None else 0
        launch = _Launch(
            grid=grid,
            threads=threads,
            shared=self._shared if shared is None else shared,
            cooperative=cooperative,
            cluster=cluster,
            seed=how.seed,
            most_turns=how.most_turns,
            patient=how.patient,
            host_every=how.host_every,
            host=ctypes.CFUNCTYPE(None)(host),
            message=ctypes.addressof(message),
            message_bytes=len(message),
        )
        failed = self._function(ctypes.byref(launch), addresses)
        how.turns, how.seed = launch.turns, how.seed + 1
        if failed:
            raise EmulatedFault(message.value.decode())


def _parameter(argument: Argument) -> ctypes._SimpleCData[object]:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        assert argument.device.type == "cpu", "an emulated kernel's tensors are on the CPU"
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    assert isinstance(argument, float), "tensor maps are not emulated"
    return ctypes.c_float(argument)


def _compiled(
    name: str, defines: Mapping[str, int], folder: Traversable | None, patches: tuple[Patch, ...]
) -> pathlib.Path:
    """The library, from the cache if nothing has changed."""
    texts = _texts(folder)
    for file, old, new in patches:
        count = texts[file].count(old)
        assert count == 1, f"{file} has {count} times: {old}"
        texts[file] = texts[file].replace(old, new)
    names = _KERNEL.findall(texts[name])
    texts[name] = '#include "cuda_host.h"\n' + texts[name]
    texts[name] += "".join(f"\nEMULATED_KERNEL({each})" for each in names)
    options = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    key = _key(name, *options, *(f"{file}\0{text}" for file, text in sorted(texts.items())))
    path = _cache() / f"{name.removesuffix('.cu')}-{key}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory() as build:
            at = pathlib.Path(build)
            for file, text in texts.items():
                (at / file).write_text(_DYNAMIC.sub(_dynamic, text))
            source = ("-x", "c++", str(at / name), "-x", "none", str(_machine()))
            _run(*_FLAGS, "-O1", f"-I{_HERE}", *options, "-shared", *source, to=path)
    return path


def _dynamic(match: re.Match[str]) -> str:
    return f"auto* const {match[1]} = static_cast<unsigned char*>(emulator::dynamic_memory());"


def _texts(folder: Traversable | None) -> dict[str, str]:
    """All sources but the one that the host has its own of."""
    folders = [importlib.resources.files("legato_engine.kernels.cuda") / "sources"]
    folders += [] if folder is None else [folder]
    files = [
        file for each in folders for file in each.iterdir() if file.name.endswith((".cu", ".cuh"))
    ]
    return {file.name: file.read_text() for file in files if file.name != "ptx.cuh"}


@functools.cache
def _machine() -> pathlib.Path:
    """The scheduler's object file."""
    path = _cache() / f"machine-{_key()}.o"
    if not path.is_file():
        _run(*_FLAGS, "-O2", "-c", str(_HERE / "machine.cpp"), to=path)
    return path


def _key(*of: str) -> str:
    digest = hashlib.sha256(repr((_compiler(), _FLAGS, of)).encode())
    for file in _HOST_FILES:
        digest.update((_HERE / file).read_bytes())
    return digest.hexdigest()[:24]


@functools.cache
def _compiler() -> str:
    asked = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()[0]


def _cache() -> pathlib.Path:
    folder = pathlib.Path(tempfile.gettempdir()) / f"legato-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _run(*arguments: str, to: pathlib.Path) -> None:
    """Compile into a file that appears whole."""
    part = to.with_suffix(f".{os.getpid()}{to.suffix}")
    ran = subprocess.run(["g++", *arguments, "-o", str(part)], capture_output=True, text=True)
    assert ran.returncode == 0, f"{to.name} does not compile:\n{ran.stderr[:8000]}"
    part.replace(to)
