"""A text family's tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from legato_engine.errors import InvalidField
from legato_engine.models.text import byte_of_letter
from legato_engine.models.untrusted import check_tokenizer, encoding, refusing

_SPACE = "\u2581"  # a space in vocabularies with byte fallback
_NO_BYTE = "\ue000"  # beyond Latin-1, whose 256 characters stand for the bytes
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TextTokenizer:
    """Thread-safe encoding and decoding; texts are never cut or padded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._inert = _sharing(tokenizer)
        self._inert.encode_special_tokens = True  # ignores special tokens in text
        self._pieces = _pieces(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder().values()
        specials = [re.escape(token.content) for token in added if token.special]
        self._special = re.compile("|".join(specials)) if specials else None

    @classmethod
    def read(cls, path: Path) -> TextTokenizer:
        """Read a tokenizer.json, after a confined process has tried it.

        Raises:
            InvalidField: the file is missing, or no tokenizer that can be used.
        """
        content = read_text(path)
        check_tokenizer(path)
        with refusing(str(path), "tokenizer"):
            return cls(tokenizers.Tokenizer.from_str(content))

    @property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, opened: bool = False) -> tuple[int, ...]:
        """Recognise no special tokens; `opened`: add the tokenizer's BOS, if it has one."""
        with encoding():
            return tuple(self._inert.encode(text, add_special_tokens=opened).ids)

    def encode_marked(self, text: str) -> tuple[int, ...]:
        """Recognise special tokens, and add none."""
        with encoding():
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def has_special(self, text: str) -> bool:
        """Return whether `encode_marked` would find a special token."""
        return self._special is not None and self._special.search(text) is not None

    def first_added(self, text: str) -> int | None:
        """Return the first token that is no part of the plain vocabulary, unless it is a space."""
        added = self._tokenizer.get_added_tokens_decoder()
        ids = self.encode_marked(text)
        return next((i for i in ids if i in added and added[i].content.strip()), None)

    def token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def piece(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, b"")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidField(f"no tokenizer at {path}: {error.strerror}", field="tokenizer") from None
    except ValueError:
        raise InvalidField(f"{path} is not JSON", field="tokenizer") from None


def _sharing(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Make another one of the same parts, whose parsing would take time and memory again."""
    other = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (shared := getattr(tokenizer, part)) is not None:
            setattr(other, part, shared)
    other.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return other


def _decoders(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """Names of the steps by which tokens become text."""
    if tokenizer.decoder is None:
        return set()
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def _pieces(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes]:
    decoders = _decoders(tokenizer)
    if "ByteLevel" in decoders:
        byte_of = byte_of_letter()
        unknown = dict.fromkeys(map(chr, range(256)), _NO_BYTE)
        latin = str.maketrans(unknown | {each: chr(byte) for each, byte in byte_of.items()})

        def read(text: str) -> bytes:
            try:
                return text.translate(latin).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()

    elif "ByteFallback" in decoders:

        def read(text: str) -> bytes:
            byte = _BYTE.fullmatch(text)
            return bytes.fromhex(byte[1]) if byte else text.replace(_SPACE, " ").encode()

    else:
        kinds = ", ".join(sorted(decoders)) or "nothing"
        raise InvalidField(
            f"the tokenizer decodes by {kinds}; ByteLevel and ByteFallback are implemented",
            field="tokenizer",
        )
    added = tokenizer.get_added_tokens_decoder()

    def entries() -> Iterator[tuple[int, bytes]]:
        for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id in added:
                yield token_id, b"" if added[token_id].special else text.encode()
            else:
                yield token_id, read(text)

    return dict(entries())
