"""CUDA sources compiled by a C++ compiler, every thread a fiber, and models small enough for it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.resources
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import cast

import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.kernels.cuda import capability
from legato_engine.kernels.cuda.module import Argument, Compile
from legato_engine.kernels.megakernel.sizes import ModelSizes

from tests.megakernel.words import Machine

# ---------------------------------------------------------------- build
# CUDA sources compiled by a C++ compiler, each once per machine.

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


# ---------------------------------------------------------------- module
# CUDA sources compiled for the host, and launched with every thread as a fiber of this one.
#
# `EmulatedModule` takes the place of `kernels.cuda.module.Module` where tensors are on a CPU.

_MESSAGE_BYTES = 16384


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
        ("order", ctypes.c_uint64),
    )


@dataclasses.dataclass
class Schedule:
    """How launches run: in an order drawn by `seed`, of which each launch has its own.

    `patient`: where nothing goes on but waits, time does, so that waits time out; else it is a
    fault. `host` is called every so many turns.
    """

    seed: int = 1
    patient: bool = False
    most_turns: int = 2_000_000_000
    host: Callable[[], None] | None = None
    host_every: int = 1000
    turns: int = 0
    """Of the last launch."""
    order: int = 0
    """A hash of the threads that had the turns of the last launch."""


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
        """`folder` as `Module` has it; `patches` change the sources first.

        A module is compiled when its first kernel is launched.
        """
        constants = {**capability.macros(capability.current_gpu().arch()), **defines}
        self._library = functools.cache(
            lambda: ctypes.CDLL(str(compiled(name, constants, folder, patches)))
        )
        self._schedule = schedule or Schedule()

    def kernel(self, name: str, *, shared: int = 0) -> EmulatedKernel:
        return EmulatedKernel(self._library, name, shared, self._schedule)


class EmulatedKernel:
    """One kernel, whose launches are over when `launch` returns."""

    def __init__(
        self, library: Callable[[], ctypes.CDLL], name: str, shared: int, schedule: Schedule
    ) -> None:
        self._library, self._shared, self._schedule = library, shared, schedule
        self._name = f"emulate_{name}"

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
        library = self._library()
        failed = getattr(library, self._name)(ctypes.byref(launch), addresses)
        how.turns, how.order, how.seed = launch.turns, launch.order, how.seed + 1
        if failed:
            text = _with_arguments(message.value.decode(), arguments)
            raise EmulatedFault(_with_line(text, library))


def _with_arguments(text: str, arguments: Sequence[Argument]) -> str:
    """Addresses as bytes of an argument."""

    def named(match: re.Match[str]) -> str:
        at = int(match[0], 16)
        for index, each in enumerate(arguments):
            if isinstance(each, torch.Tensor) and 0 <= at - each.data_ptr() < max(each.nbytes, 1):
                return f"argument {index} + {at - each.data_ptr()}"
        return match[0]

    return re.sub(r"0x[0-9a-f]{6,}", named, text)


def _with_line(text: str, library: ctypes.CDLL) -> str:
    """The line of the source, and those of the calls that it was inlined into."""
    code = re.search(r"code \+ (0x[0-9a-f]+)", text)
    if code is None:
        return text
    asked = ("addr2line", "-i", "-e", library._name, code[1])
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return text.replace(code[0], " < ".join(pathlib.PurePath(line).name for line in lines))


def _parameter(argument: Argument) -> ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        assert argument.device.type == "cpu", "an emulated kernel's tensors are on the CPU"
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    assert isinstance(argument, float), "tensor maps are not emulated"
    return ctypes.c_float(argument)


CPU = torch.device("cpu")
SMALL = ModelSizes(dim=128, ff_ratio=2, num_layers=2, vocab_size=256)
"""8 workers, of two heads."""
NARROW = ModelSizes(dim=64, ff_ratio=3, num_layers=2, vocab_size=128)
"""4 workers, of which each samples and settles several rows."""
EVEN = ModelSizes(dim=192, ff_ratio=2, num_layers=2, vocab_size=384)
"""12 workers. Captured steps cut a layer's inputs into chunks as wide as the kernel's, as they do
with real models and unlike with the smaller ones: so sums run in the same order.
"""
WIDE = ModelSizes(dim=1024, ff_ratio=3, num_layers=1, vocab_size=1024)
"""64 workers; a layer's outputs are sums of parts."""


def emulated(schedule: Schedule | None = None, *patches: Patch) -> Machine:
    """A CPU that plays a GPU; `patches` change the kernel's source."""
    schedule = schedule or Schedule()
    compile_source = functools.partial(EmulatedModule, schedule=schedule, patches=patches)
    return Machine(CPU, cast(Compile, compile_source), _device())


@functools.cache
def _device() -> CpuDevice:
    return CpuDevice(1)
