"""Text to ids, and ids to bytes, because a token may end inside a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from legato_engine.errors import InternalError, InvalidField
from legato_engine.models.decoder.tokenizer import TextTokenizer, read_text
from legato_engine.models.untrusted import check_tokenizer, refusing

NUM_SPECIAL = 21
"""Ids below this are special in every Moondream vocabulary."""


class BytePairTokenizer(TextTokenizer):
    """A byte-level tokenizer.json."""

    def __init__(self, path: Path, *, is_shipped: bool = False) -> None:
        """Read a file, which is tried in a confined process first unless it `is_shipped`."""
        data = _read(path)
        if not is_shipped:
            check_tokenizer(path)
        with refusing(f"{path} is not a byte-level tokenizer and", "tokenizer"):
            for token in data.get("added_tokens") or ():
                token["special"] = token.get("special", False) or token["id"] < NUM_SPECIAL
            super().__init__(tokenizers.Tokenizer.from_str(json.dumps(data)))

    def encode(self, text: str, *, opened: bool = False) -> tuple[int, ...]:
        ids = super().encode(text, opened=opened)
        if any(token_id < NUM_SPECIAL for token_id in ids):
            raise InternalError("the tokenizer made a special id out of text")
        return ids

    def piece(self, token_id: int) -> bytes:
        return b"" if token_id < NUM_SPECIAL else super().piece(token_id)


class StandInTokenizer:
    """One id per byte, for random weights; higher ids decode to lower-case letters."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(NUM_SPECIAL + byte for byte in text.encode())

    def piece(self, token_id: int) -> bytes:
        if token_id < NUM_SPECIAL:
            return b""
        byte = token_id - NUM_SPECIAL
        return bytes([byte if byte < 256 else ord("a") + byte % 26])


def _read(path: Path) -> dict[str, Any]:
    try:
        data: Any = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise InvalidField(f"{path} is not JSON", field="tokenizer") from None
    decoder = data.get("decoder") if isinstance(data, dict) else None
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise InvalidField(f"{path} is not a byte-level tokenizer", field="tokenizer")
    return dict(data)
