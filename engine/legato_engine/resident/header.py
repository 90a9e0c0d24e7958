"""What the device knows of the program: constants and the layout of an instruction.

`python -m legato_engine.resident.header` writes `sources/program.cuh`; a test compares the two.
"""

from __future__ import annotations

import importlib.resources

from legato_engine.resident import sizes
from legato_engine.resident.instructions import FIELDS, NONE, WORD_BYTES, WORDS, Op, Source
from legato_engine.resident.sizes import ModelSizes

FILE = "program.cuh"
_CONSTANTS = (
    "BLOCK",
    "HEAD_DIM",
    "ROTARY_DIM",
    "SPLITS",
    "GROUP",
    "WARPS",
    "PRODUCERS",
    "MAX_ROWS",
    "PAGE",
    "PAGE_BYTES",
    "RANGES",
    "NEAR_RANGES",
    "NEAR_DIGITS",
    "FAR_DIGITS",
)


def header() -> str:
    """The text of the file."""
    lines = [
        "// Written by `python -m legato_engine.resident.header`; instructions.py explains it.",
        "#pragma once",
        "",
        *(f"constexpr int {name} = {getattr(sizes, name)};" for name in _CONSTANTS),
        f"constexpr int NONE = {NONE};",
        "",
        *(f"constexpr int OP_{op.name} = {op.value};" for op in Op),
        "",
        *(f"constexpr int SOURCE_{source.name} = {source.value};" for source in Source),
        "",
        "struct __align__(16) Instruction {",
        f"  short {', '.join(FIELDS)};",
        f"  short unused[{WORDS - len(FIELDS)}];",
        "};",
        f"static_assert(sizeof(Instruction) == {WORDS * WORD_BYTES},"
        f' "an instruction has {WORDS} words");',
    ]
    return "\n".join(lines) + "\n"


def defines(model: ModelSizes, ring_stages: int, under_way: int, tiles: int) -> dict[str, int]:
    """Constants of a build: the model's sizes, the ring, and groups of 8 tokens.

    `under_way`: stages of the ring that are being copied at once, at most.
    """
    return {
        "DIM": model.dim,
        "FF": model.ff_dim,
        "VOCAB": model.vocab_size,
        "CHUNK": model.chunk,
        "PARTS": model.out_parts,
        "STAGE_PAGES": model.pages_per_stage,
        "RING": ring_stages,
        "UNDER_WAY": under_way,
        "TILES": tiles,
    }


if __name__ == "__main__":
    folder = importlib.resources.files(__package__) / "sources"
    with importlib.resources.as_file(folder / FILE) as path:
        path.write_text(header())
