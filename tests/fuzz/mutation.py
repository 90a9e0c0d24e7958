"""Seeded damage to bytes."""

from __future__ import annotations

import random

_EDGES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one to eight faults; the same for the same state of `chance`."""
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        if not mutant:
            break
        at = chance.randrange(len(mutant))
        length = min(chance.choice((1, 2, 4, 16, 64)), len(mutant) - at)
        match chance.randrange(7):
            case 0:
                mutant[at] ^= 1 << chance.randrange(8)
            case 1:
                mutant[at] = chance.choice(_EDGES)
            case 2:
                mutant[at : at + length] = chance.randbytes(length)
            case 3:
                del mutant[at : at + length]
            case 4:
                mutant[at:at] = mutant[at : at + length] * chance.randint(1, 20)
            case 5:
                other = chance.randrange(len(mutant))
                mutant[at : at + length] = mutant[other : other + length]
            case 6:
                del mutant[chance.randrange(len(mutant)) :]
    return bytes(mutant)
