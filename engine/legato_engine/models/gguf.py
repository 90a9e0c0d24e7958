"""GGUF files: metadata, tensors and dequantisation of their blocks.

The library takes two to four times as long, which a start waits for; other types are left to it.
"""

from __future__ import annotations

import functools
import importlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from legato_engine.errors import InvalidField
from legato_engine.models.untrusted import refusing

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the rotation's factors, a part of the configuration."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]

_CHUNK_BYTES = 2**17  # of blocks, so that what is made of them between stays in a core's cache
_NUMBERS_AT_ONCE = 2**18  # likewise


class BlockCodes(NamedTuple):
    """Codes of blocks, [N, codes of a block], with scales and minima of their groups, [N, groups].

    A number is code * scale + minimum; without minima unsigned codes are 8 above.
    """

    values: npt.NDArray[np.uint8 | np.int8]
    scales: Numbers
    minima: Numbers | None


def dequantise(kind: str, blocks: Bytes, out: Numbers) -> None:
    """Write rows of bytes, a block each, as rows of numbers; `kind` is in `SPLIT`."""
    rows = _CHUNK_BYTES // blocks.shape[1]
    for start in range(0, len(blocks), rows):
        codes = SPLIT[kind](blocks[start : start + rows])
        groups = out[start : start + rows].reshape(*codes.scales.shape, -1)
        groups[...] = codes.values.reshape(groups.shape)
        if codes.minima is None and codes.values.dtype == np.uint8:
            groups -= 8
        groups *= codes.scales[:, :, None]
        if codes.minima is not None:
            groups += codes.minima[:, :, None]


def _q4_k(blocks: Bytes) -> BlockCodes:
    """Eight groups of 32, whose scales and minima have 6 bits and a factor of the whole block."""
    low, high, both = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scale = np.concatenate([low & 63, (both & 15) | (low >> 2 & 48)], 1).astype(np.float32)
    least = np.concatenate([high & 63, (both >> 4) | (high >> 2 & 48)], 1).astype(np.float32)
    scale *= _halves(blocks[:, :2])
    least *= -_halves(blocks[:, 2:4])
    return BlockCodes(_nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256), scale, least)


def _q5_k(blocks: Bytes) -> BlockCodes:
    """Split as Q4_K, with the fifth bit of group i in bit i of 32 bytes before the nibbles."""
    codes = _q4_k(np.concatenate([blocks[:, :16], blocks[:, 48:]], 1))
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes._replace(values=codes.values | (fifth << 4).reshape(-1, 256))


def _q6_k(blocks: Bytes) -> BlockCodes:
    """Sixteen groups of 16; the lower 4 bits of a number and the upper 2 are apart."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    for quarter in range(4):
        quants[:, :, quarter] = (high >> 2 * quarter & 3) << 4
    quants.reshape(-1, 2, 128)[:, :, :64] |= low & 15
    quants.reshape(-1, 2, 128)[:, :, 64:] |= low >> 4
    scale = blocks[:, 192:208].view(np.int8) * _halves(blocks[:, 208:210])
    return BlockCodes(quants.reshape(-1, 256).view(np.int8) - np.int8(32), scale, None)


def _halves(pairs: Bytes) -> Numbers:
    """Two bytes of each block as a column of numbers."""
    return np.ascontiguousarray(pairs).view(np.float16).astype(np.float32)


def _nibbles(quants: Bytes) -> Bytes:
    """Unpack nibbles: each row's low halves, then its high halves."""
    quants = np.ascontiguousarray(quants)
    return np.concatenate([quants & 15, quants >> 4], 1)


SPLIT: Mapping[str, Callable[[Bytes], BlockCodes]] = {
    "Q4_0": lambda each: BlockCodes(_nibbles(each[:, 2:]), _halves(each[:, :2]), None),
    "Q4_1": lambda each: BlockCodes(
        _nibbles(each[:, 4:]), _halves(each[:, :2]), _halves(each[:, 2:4])
    ),
    "Q8_0": lambda each: BlockCodes(each[:, 2:].view(np.int8), _halves(each[:, :2]), None),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By type: splits blocks into codes, scales and minima."""


# ---------------------------------------------------------------- reader

SUFFIX = ".gguf"
NUMBERS = ("F32", "F16", "BF16")
"""Types without blocks."""

TYPES = (
    *NUMBERS,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)
"""Types of tensors that are read."""

_ARRAY, _LENGTH = struct.Struct("<IQ"), struct.Struct("<Q")  # before its values, its characters
_INSTALL = (
    'GGUF files are read with a library of its own: pip install "legato-server[gguf]", '
    'in a clone pip install -e "service[gguf]"'
)


class StoredTensor(NamedTuple):
    """A tensor's place in the file; `shape` as torch has it, rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile(NamedTuple):
    """Metadata and tensor index of a GGUF file, without tensor data."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def size(self, key: str, default: int | float | None = None) -> Any:
        """Read a number of the architecture, such as `attention.head_count`.

        Raises:
            InvalidField: it is not there and has no default, or is no number.
        """
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise InvalidField(f"{self.path.name} has no {full}", field="weights")
        if isinstance(value, bool) or not isinstance(value, int | float):
            problem = f"{self.path.name}: {full} is no number; sizes by layer are not implemented"
            raise InvalidField(problem, field="weights")
        return value

    def read(self, name: str, out: npt.NDArray[np.float32]) -> None:
        """Write a tensor, dequantised, into a contiguous array of its shape."""
        import gguf

        stored = self.tensors[name]
        if stored.kind.name in SPLIT:
            size, _ = gguf.GGML_QUANT_SIZES[stored.kind]
            dequantise(stored.kind.name, self._blocks(stored), out.reshape(-1, size))
            return
        rows = self._data(stored).reshape(*stored.shape[:-1], -1)
        plain = {"F32": np.float32, "F16": np.float16}.get(stored.kind.name)
        values = rows.view(plain) if plain else gguf.dequantize(rows, stored.kind)
        out[...] = values.reshape(stored.shape)

    def chunks(self, name: str) -> Iterator[Numbers]:
        """Yield a matrix, dequantised, some rows at a time, which bounds the memory of a start."""
        stored = self.tensors[name]
        rows, inputs = stored.shape
        size, step = stored.num_bytes // rows, max(_NUMBERS_AT_ONCE // inputs, 1)
        for first in range(0, rows, step):
            out = np.empty((min(step, rows - first), inputs), np.float32)
            part = StoredTensor(
                stored.kind, out.shape, stored.offset + first * size, len(out) * size
            )
            self._replace(tensors={name: part}).read(name, out)
            yield out

    def codes(self, name: str) -> BlockCodes:
        """Return a matrix in blocks, row by row."""
        stored = self.tensors[name]
        codes = SPLIT[stored.kind.name](self._blocks(stored))
        rows = stored.shape[0]
        minima = None if codes.minima is None else codes.minima.reshape(rows, -1)
        return BlockCodes(codes.values.reshape(rows, -1), codes.scales.reshape(rows, -1), minima)

    def _blocks(self, stored: StoredTensor) -> Bytes:
        import gguf

        return self._data(stored).reshape(-1, gguf.GGML_QUANT_SIZES[stored.kind][1])

    def _data(self, stored: StoredTensor) -> Bytes:
        return np.fromfile(self.path, np.uint8, stored.num_bytes, offset=stored.offset)


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == SUFFIX


@functools.lru_cache(maxsize=1)
def read_gguf(path: Path) -> GgufFile:
    """Read a file's header and keep it until another one or `cache_clear`.

    Raises:
        InvalidField: the file or the library is missing, the file is damaged or one of several,
            or a tensor has a type that is not read.
    """
    try:
        reader_class = _reader_class()
    except ModuleNotFoundError:
        raise InvalidField(_INSTALL, field="weights") from None
    with refusing(path.name if path.is_file() else str(path), "weights"):
        reader = reader_class(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        num_parts = metadata.get("split.count", 1)
        if num_parts != 1:
            problem = f"{path.name} is one of {num_parts} files: merge them with gguf-split"
            raise InvalidField(problem, field="weights")
        if unread := sorted({t.tensor_type.name for t in reader.tensors} - {*TYPES}):
            raise InvalidField(
                f"{path.name} has tensors of the types {', '.join(unread)}; implemented are "
                f"{', '.join(TYPES)}",
                field="weights",
            )
        tensors = {tensor.name: _stored(tensor) for tensor in reader.tensors}
    return GgufFile(path, metadata, tensors)


def _stored(tensor: Any) -> StoredTensor:
    """Check that a tensor's shape is that of its bytes: the library's product may wrap around."""
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    if math.prod(shape) * num_bytes != int(tensor.n_bytes) * size:
        raise ValueError(f"{tensor.name} has the shape {shape} and {tensor.n_bytes} bytes")
    return StoredTensor(tensor.tensor_type, shape, int(tensor.data_offset), int(tensor.n_bytes))


def _reader_class() -> Any:
    """Return a subclass of the library's reader that is faster and checks bounds.

    It views an array's numbers at once and its texts without numpy, and fails where the library
    would read beyond the end of the file.
    """
    gguf = importlib.import_module("gguf")
    of_array, of_string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

    class WholeFile(gguf.GGUFReader):  # type: ignore[misc, name-defined]  # found at run time
        data: Any

        def _get(self, offset: int, dtype: Any, count: Any = 1, **order: Any) -> Any:
            self.data = self.data.view(np.ndarray)  # whose slices take a fifth of the time
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)} and refers to byte {end}")
            return super()._get(offset, dtype, count, **order)

        def _get_field_parts(self, start: int, kind: int) -> tuple[int, list[Any], list[int], Any]:
            """Return a value's size, its parts, those of them that are data, and its types."""
            if self.endianess is not gguf.GGUFEndian.LITTLE:
                raise ValueError("its numbers are big-endian, which is not implemented")
            if kind != of_array:
                return super()._get_field_parts(start, kind)  # type: ignore[no-any-return]
            first = start + _ARRAY.size
            of, count = _ARRAY.unpack_from(self.data, start)
            if of == of_string:
                texts, end = _texts(memoryview(self.data), first, count)
                return end - start, texts, [*range(count)], [of_array, of_string]
            if (number := self.gguf_scalar_to_np.get(gguf.GGUFValueType(of))) is None:
                raise ValueError("it has an array of arrays")
            values = self._get(first, number, count)
            return first + values.nbytes - start, [values], [0], [of_array, gguf.GGUFValueType(of)]

    return WholeFile


def _texts(file: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
    """Return an array's strings and the offset after them."""
    texts = []
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(file, start)
        start += _LENGTH.size + size
        if start > len(file):
            raise ValueError(f"it ends at byte {len(file)} and refers to byte {start}")
        texts.append(file[start - size : start])
    return texts, start
