"""Incremental detokenization, cut before a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Pieces(Protocol):
    """A vocabulary's bytes by token id."""

    def piece(self, token_id: int) -> bytes:
        """A token's bytes, perhaps part of a character; none for special ids."""
        ...


class Detokenizer:
    """Joins tokens into text; the results of `push` and `close` add up to `text`.

    Bytes of an unfinished character wait for the rest, and text that may begin a stop string until
    that is decided. Leading whitespace and unfinished characters are dropped.
    """

    def __init__(self, tokenizer: Pieces, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Return the text that is final now; set `stopped` at a stop string."""
        if self.stopped:
            return ""
        pending = self._held + self._decoder.decode(self._tokenizer.piece(token_id))
        if not self.text:
            pending = pending.lstrip()
        if not self._stop:
            return self._show(pending)
        cut = min((at for stop in self._stop if (at := pending.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            self._held = ""
            return self._show(pending[:cut])
        shown = len(pending) - self._num_held(pending)
        self._held = pending[shown:]
        return self._show(pending[:shown])

    def close(self) -> str:
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        self.text += text
        return text

    def _num_held(self, pending: str) -> int:
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop):
                return length
        return 0
