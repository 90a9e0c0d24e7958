"""Vocabularies whose entries are bytes written as letters."""

from __future__ import annotations


def byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, the others from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
