"""What a cubin of compute capability 9.0 says of its instructions and of what they wait for."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

_READ_SHARED, _BARRIER_ARRIVAL = 0x984, 0x9A7  # `LDS`, and `SYNCS.ARRIVE`
_PIECES = {0, 0x200, 0x400, 0x600}  # bytes at which a lane reads its packed weights of a stage
_SIXTEEN_BYTES = 6
_NONE = 7


class Section(NamedTuple):
    """Of an ELF file: its name, and where it begins and how long it is."""

    name: str
    start: int
    size: int


class Instruction(NamedTuple):
    """An operation with the scoreboards that it waits for, and the one that its result clears.

    `base` and `offset` are a read's address: a register, and bytes.
    """

    opcode: int
    is_wide: bool
    base: int
    offset: int
    clears: int | None
    waits: frozenset[int]


def sections(code: bytes) -> list[Section]:
    """All of an ELF file's."""
    (table,) = struct.unpack_from("<Q", code, 40)
    entry, count, names_at = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * entry) for i in range(count)]
    names = headers[names_at][4]
    return [Section(text_at(code, names + h[0]), start=h[4], size=h[5]) for h in headers]


def text_at(code: bytes, start: int) -> str:
    """Return the text that ends with a zero byte."""
    return code[start : code.index(b"\0", start)].decode()


def instructions(code: bytes, kernel: str) -> Iterator[Instruction]:
    """All of a kernel's, in their order in memory."""
    (text,) = (section for section in sections(code) if section.name == f".text.{kernel}")
    for at in range(text.start, text.start + text.size, 16):
        low, high = struct.unpack_from("<QQ", code, at)
        clears, waits = high >> 46 & 7, high >> 52 & 0x3F
        yield Instruction(
            opcode=low & 0xFFF,
            is_wide=high >> 9 & 7 == _SIXTEEN_BYTES,
            base=low >> 24 & 0xFF,
            offset=low >> 40 & 0xFFFFFF,
            clears=None if clears == _NONE else clears,
            waits=frozenset(i for i in range(6) if waits >> i & 1),
        )


def under_way(
    kernel: Iterable[Instruction], layouts: Collection[set[int]] = (_PIECES,)
) -> tuple[int, list[int]]:
    """Return how many stages of weights a kernel reads, and its arrivals before reads are over.

    An arrival is named by its place among the instructions. `layouts` are the bytes at which a lane
    reads a stage.
    """
    stages, early = 0, []
    pieces: dict[int, set[int]] = {}  # that were read since the last arrival, by their address
    waiting: list[Instruction] = []  # whose results nothing has waited for
    for place, it in enumerate(kernel):
        waiting = [read for read in waiting if read.clears not in it.waits]
        if it.opcode == _READ_SHARED:
            # Results arrive in order: a read without a scoreboard has that of a later one, as wide
            # reads of codes have that of their scales.
            waiting = [r if r.clears is not None else r._replace(clears=it.clears) for r in waiting]
            if it.is_wide:
                waiting.append(it)
                pieces.setdefault(it.base, set()).add(it.offset)
        elif it.opcode == _BARRIER_ARRIVAL:
            weights = {base for base, offsets in pieces.items() if offsets in layouts}
            stages += len(weights)
            if any(read.base in weights for read in waiting):
                early.append(place)
            pieces.clear()
    return stages, early
