"""Text to ids, and ids to bytes, because a token may end inside a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from legato_engine.errors import InternalError, InvalidField
from legato_engine.models.text import byte_of_letter
from legato_engine.models.untrusted import check_tokenizer, encoding, refusing

NUM_SPECIAL = 21
"""Ids below this are special in every Moondream vocabulary."""


class BytePairTokenizer:
    """A byte-level tokenizer.json."""

    def __init__(self, path: Path, *, is_shipped: bool = False) -> None:
        """Read a file, which is tried in a confined process first unless it `is_shipped`."""
        data = _read(path)
        if not is_shipped:
            check_tokenizer(path)
        with refusing(f"{path} is not a byte-level tokenizer and", "tokenizer"):
            for token in data.get("added_tokens") or ():
                token["special"] = token.get("special", False) or token["id"] < NUM_SPECIAL
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
            self._pieces = _pieces(self._tokenizer)
        self._tokenizer.encode_special_tokens = True  # ignores special tokens in text

    @property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> tuple[int, ...]:
        with encoding():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if any(token_id < NUM_SPECIAL for token_id in ids):
            raise InternalError("the tokenizer made a special id out of text")
        return tuple(ids)

    def piece(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, b"")


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
        data: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidField(f"no tokenizer at {path}: {error.strerror}", field="tokenizer") from None
    except (ValueError, RecursionError):
        raise InvalidField(f"{path} is not JSON", field="tokenizer") from None
    if not isinstance(data, dict) or not _is_byte_level(data.get("decoder")):
        raise InvalidField(f"{path} is not a byte-level tokenizer", field="tokenizer")
    return data


def _is_byte_level(decoder: object) -> bool:
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _pieces(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes]:
    byte_of = byte_of_letter()
    added = tokenizer.get_added_tokens_decoder()
    pieces: dict[int, bytes] = {}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < NUM_SPECIAL:
            continue
        if token_id in added:
            pieces[token_id] = b"" if added[token_id].special else text.encode()
        else:
            pieces[token_id] = bytes(byte_of[letter] for letter in text)
    return pieces
