"""The compiled library of this machine, as ctypes calls it; structures are those of its sources."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import structlog
import torch

from legato_engine.kernels.cpu.compiler import CannotCompileError, instructions_of, library_path

_log = structlog.get_logger()

_Pointer = ctypes.c_void_p
_handed = threading.local()


class LinearStruct(ctypes.Structure):
    """A packed weight and its bias."""

    _fields_ = (
        ("data", _Pointer),
        ("bias", _Pointer),
        ("kind", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


class CodesStruct(ctypes.Structure):
    """A quantised weight, a byte for each value."""

    _fields_ = (
        *((name, _Pointer) for name in ("values", "scales", "minima")),
        *((name, ctypes.c_int64) for name in ("group", "groups")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs")),
    )


class NormStruct(ctypes.Structure):
    """An RMS norm, with a bias a layer norm; none without a weight."""

    _fields_ = (("weight", _Pointer), ("bias", _Pointer), ("epsilon", ctypes.c_float))


class LayerStruct(ctypes.Structure):
    """One layer's norms and maps."""

    _fields_ = (
        *((name, NormStruct) for name in ("norm", "next_norm", "query_norm", "key_norm")),
        *((name, LinearStruct) for name in ("qkv", "out", "up", "down")),
    )


class DecoderStruct(ctypes.Structure):
    """All layers and their sizes."""

    _fields_ = (
        *((name, _Pointer) for name in ("layers", "cosines", "sines")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("num_layers", "dim", "inner", "heads", "key_heads", "half_rotary"),
                *("gated", "parallel"),
            )
        ),
    )


class PagesStruct(ctypes.Structure):
    """Keys and values of one layer."""

    _fields_ = (
        *((name, _Pointer) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("page_stride", "head_stride", "slot_stride")),
        *((name, ctypes.c_int32) for name in ("bf16", "slots", "dims")),
    )


class LowRankStruct(ctypes.Structure):
    """Adapters of adjacent outputs of one map."""

    _fields_ = (
        *((name, _Pointer) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    )


LowRanksStruct = LowRankStruct * 3
"""Adapters of all outputs of one map; the first without matrices ends them."""


class AdaptersStruct(ctypes.Structure):
    """Adapters of all layers, and each row's slot."""

    _fields_ = (
        *((name, LowRanksStruct) for name in ("qkv", "out", "up", "down")),
        *((name, _Pointer) for name in ("slots", "ranks")),
        ("layer_slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("capacity", "bf16", "shared")),
    )


class StepStruct(ctypes.Structure):
    """Rows of sequences, and where their keys and values are."""

    _fields_ = (
        *((name, _Pointer) for name in ("x", "positions", "lengths", "tables")),
        *((name, _Pointer) for name in ("cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("rows", "table_stride", "tile")),
        ("pages", PagesStruct),
        ("layer_bytes", ctypes.c_int64),
        ("caches_only", ctypes.c_int32),
        ("adapters", AdaptersStruct),
    )


class Library:
    """Functions of the library, and its threads."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._new_pool = library.legato_pool
        self._new_pool.restype, self._new_pool.argtypes = _Pointer, (ctypes.c_int32,)
        self._pools: dict[int, int] = {}
        self.instructions = instructions_of(library)
        self.packed_bytes = library.legato_packed_bytes
        self.packed_bytes.restype, self.packed_bytes.argtypes = ctypes.c_int64, (_Pointer,)
        rows = ctypes.c_int64
        self.pack = _procedure(
            library.legato_pack, _Pointer, _Pointer, _Pointer, ctypes.c_int32, _Pointer
        )
        self.pack_codes = _procedure(
            library.legato_pack_codes, _Pointer, _Pointer, _Pointer, _Pointer
        )
        self.unpack = _procedure(library.legato_unpack, _Pointer, _Pointer, rows, _Pointer)
        self.multiply = _procedure(
            library.legato_multiply, _Pointer, _Pointer, _Pointer, rows, _Pointer
        )
        self.layers = _procedure(library.legato_layers, _Pointer, _Pointer, _Pointer)

    def pool(self) -> int:
        """Threads for a call, as many as torch has or has handed over; they sleep between calls."""
        count = getattr(_handed, "count", 0) or torch.get_num_threads()
        if count not in self._pools:
            self._pools[count] = self._new_pool(count)
        return self._pools[count]


def take_threads() -> None:
    """Let the library compute with this thread's number of threads, and torch with one.

    Else torch's threads would spin for milliseconds after each operation, on the cores that the
    library's need.
    """
    _handed.count = torch.get_num_threads()
    torch.set_num_threads(1)


def library(choice: str) -> Library | None:
    """Load the library, which may be compiled for that; None if `choice` is torch, or none can be.

    Its instructions, or a reason, are logged once.
    """
    return _library() if choice == "auto" else None


@functools.cache
def _library() -> Library | None:
    try:
        found = Library(str(library_path()))
    except (CannotCompileError, OSError) as error:
        reason = f"because {error}, layers run on the CPU by torch's kernels, which are slower"
        _log.warning("no_cpu_kernels", reason=reason)
        return None
    _log.info("cpu_kernels", instructions=found.instructions)
    return found


def _procedure(function: Any, *arguments: type) -> Callable[..., None]:
    function.restype, function.argtypes = None, arguments
    called: Callable[..., None] = function
    return called
