"""Arithmetic of the device in Python: each operation rounded to float32 once.

A double holds any sum, product or quotient of two float32 values to more than twice their
precision, so rounding it again gives the correctly rounded float32 result: what `__fadd_rn`,
`__fmul_rn` and `__fdiv_rn` give. The compiler must not fuse them on the device.
"""

from __future__ import annotations

import struct

_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    """`value` rounded to the nearest float32."""
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded
