"""The device's float32 arithmetic in Python: each operation rounded to float32 once.

A double holds a sum, product or quotient of two float32 values to more than twice their precision,
so rounding it to float32 gives the result of `__fadd_rn`, `__fmul_rn` and `__fdiv_rn`. The device
compiler must not fuse these operations.
"""

from __future__ import annotations

import struct

_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    """Round to the nearest float32."""
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded
