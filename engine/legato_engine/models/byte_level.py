"""Byte-level vocabularies."""

from __future__ import annotations


def byte_of_letter() -> dict[str, int]:
    """Map letters to bytes: printable bytes are themselves, others count from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
