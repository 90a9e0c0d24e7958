"""CUDA sources compiled for the host, and launched with every thread as a fiber of this one.

`EmulatedModule` takes the place of `kernels.cuda.module.Module` where tensors are on a CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable

import torch
from legato_engine.kernels.cuda import capability
from legato_engine.kernels.cuda.module import Argument

from tests.emulator.build import Patch, compiled

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
