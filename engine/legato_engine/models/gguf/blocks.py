"""Numbers of the usual block types as float32, bit for bit those of the library `gguf`.

The library takes two to four times as long, which a start waits for; other types are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]

_CHUNK_BYTES = 2**17  # of blocks, so that what is made of them between stays in a core's cache


def dequantise(kind: str, blocks: Bytes, out: Numbers) -> None:
    """Write rows of bytes, a block each, as rows of numbers; `kind` is in `DEQUANTISE`."""
    convert, rows = DEQUANTISE[kind], _CHUNK_BYTES // blocks.shape[1]
    for start in range(0, len(blocks), rows):
        convert(blocks[start : start + rows], out[start : start + rows])


def _q4_0(blocks: Bytes, out: Numbers) -> None:
    out[...] = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _halves(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Numbers) -> None:
    out[...] = _nibbles(blocks[:, 4:])
    out *= _halves(blocks[:, :2])
    out += _halves(blocks[:, 2:4])


def _q8_0(blocks: Bytes, out: Numbers) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks[:, :2])


def _q4_k(blocks: Bytes, out: Numbers) -> None:
    """Eight groups of 32, whose scales and minima have 6 bits and a factor of the whole block."""
    low, high, both = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scale = np.concatenate([low & 63, (both & 15) | (low >> 2 & 48)], 1).astype(np.float32)
    least = np.concatenate([high & 63, (both >> 4) | (high >> 2 & 48)], 1).astype(np.float32)
    scale *= _halves(blocks[:, :2])
    least *= _halves(blocks[:, 2:4])
    groups = out.reshape(-1, 8, 32)
    groups[...] = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    groups *= scale[:, :, None]
    groups -= least[:, :, None]


def _q6_k(blocks: Bytes, out: Numbers) -> None:
    """Sixteen groups of 16; the lower 4 bits of a number and the upper 2 are apart."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    for quarter in range(4):
        quants[:, :, quarter] = (high >> 2 * quarter & 3) << 4
    quants.reshape(-1, 2, 128)[:, :, :64] |= low & 15
    quants.reshape(-1, 2, 128)[:, :, 64:] |= low >> 4
    scale = blocks[:, 192:208].view(np.int8) * _halves(blocks[:, 208:210])
    groups = out.reshape(-1, 16, 16)
    groups[...] = quants.reshape(-1, 16, 16)
    groups -= 32
    groups *= scale[:, :, None]


def _halves(pairs: Bytes) -> Numbers:
    """Two bytes of each block as a column of numbers."""
    return np.ascontiguousarray(pairs).view(np.float16).astype(np.float32)


def _nibbles(quants: Bytes) -> Bytes:
    """Of each row the lower halves of its bytes, then the upper ones."""
    quants = np.ascontiguousarray(quants)
    return np.concatenate([quants & 15, quants >> 4], 1)


DEQUANTISE: Mapping[str, Callable[[Bytes, Numbers], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""By type: writes the numbers of blocks."""
