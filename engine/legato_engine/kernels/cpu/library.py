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

_Pointer, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_handed = threading.local()


def _fields(*groups: tuple[type[Any], str]) -> tuple[tuple[str, type[Any]], ...]:
    """Return fields of a structure by their types and names."""
    return tuple((name, kind) for kind, names in groups for name in names.split())


class LinearStruct(ctypes.Structure):
    """A packed weight and its bias."""

    _fields_ = _fields((_Pointer, "data bias"), (_Int32, "kind inputs outputs"))


class CodesStruct(ctypes.Structure):
    """A quantised weight, a byte for each value."""

    _fields_ = _fields(
        (_Pointer, "values scales minima"), (_Int64, "group groups"), (_Int32, "inputs outputs")
    )


class NormStruct(ctypes.Structure):
    """An RMS norm, with a bias a layer norm; none without a weight."""

    _fields_ = _fields((_Pointer, "weight bias"), (ctypes.c_float, "epsilon"))


class LayerStruct(ctypes.Structure):
    """One layer's norms and maps."""

    _fields_ = _fields(
        (NormStruct, "norm next_norm query_norm key_norm"), (LinearStruct, "qkv out up down")
    )


class DecoderStruct(ctypes.Structure):
    """All layers and their sizes."""

    _fields_ = _fields(
        (_Pointer, "layers cosines sines"),
        (_Int32, "num_layers dim inner heads key_heads half_rotary gated parallel"),
    )


class PagesStruct(ctypes.Structure):
    """Keys and values of one layer."""

    _fields_ = _fields(
        (_Pointer, "keys values"),
        (_Int64, "page_stride head_stride slot_stride"),
        (_Int32, "bf16 slots dims"),
    )


class LowRankStruct(ctypes.Structure):
    """Adapters of adjacent outputs of one map."""

    _fields_ = _fields((_Pointer, "a b"), (_Int64, "inputs outputs"))


LowRanksStruct = LowRankStruct * 3
"""Adapters of all outputs of one map; the first without matrices ends them."""


class AdaptersStruct(ctypes.Structure):
    """Adapters of all layers, and each row's slot."""

    _fields_ = _fields(
        (LowRanksStruct, "qkv out up down"),
        (_Pointer, "slots ranks"),
        (_Int64, "layer_slots"),
        (_Int32, "capacity bf16 shared"),
    )


class StepStruct(ctypes.Structure):
    """Rows of sequences, and where their keys and values are."""

    _fields_ = _fields(
        (_Pointer, "x positions lengths tables cosines sines"),
        (_Int64, "rows table_stride tile"),
        (PagesStruct, "pages"),
        (_Int64, "layer_bytes"),
        (_Int32, "caches_only"),
        (AdaptersStruct, "adapters"),
    )


class Library:
    """Functions of the library, and its threads."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._new_pool = library.legato_pool
        self._new_pool.restype, self._new_pool.argtypes = _Pointer, (_Int32,)
        self._pools: dict[int, int] = {}
        self.instructions = instructions_of(library)
        self.packed_bytes = library.legato_packed_bytes
        self.packed_bytes.restype, self.packed_bytes.argtypes = _Int64, (_Pointer,)
        self.pack = _procedure(library.legato_pack, _Pointer, _Pointer, _Pointer, _Int32, _Pointer)
        self.pack_codes = _procedure(
            library.legato_pack_codes, _Pointer, _Pointer, _Pointer, _Pointer
        )
        self.unpack = _procedure(library.legato_unpack, _Pointer, _Pointer, _Int64, _Pointer)
        self.multiply = _procedure(
            library.legato_multiply, _Pointer, _Pointer, _Pointer, _Int64, _Pointer
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
