"""Tokens of a prompt, and those that a model sampled."""

from __future__ import annotations

import msgspec

from legato_engine.core.value import Value

Certainty = tuple[float, float]
"""Of a token with a value: its probability against that of ending, and that of its value and the
values close to it. (1, 1) for other tokens.
"""


class PromptToken(msgspec.Struct, frozen=True):
    """An input position; only the model interprets `payload`."""

    token_id: int
    payload: tuple[float, float] = (0.0, 0.0)


class Alternative(Value, frozen=True):
    """A token that might have been chosen; `logprob` is without that of a value."""

    token_id: int
    text: str
    logprob: float
    piece: bytes = b""


class TokenInfo(Value, frozen=True):
    """A sampled token and its text, empty while a character is incomplete, or its value.

    `piece` has its own bytes, perhaps a part of a character; none for tokens that carry no text.
    `logprob` is the natural logarithm of its probability at temperature 1 under its constraint,
    times that of its value.
    """

    token_id: int
    text: str = ""
    logprob: float | None = None
    coordinate: float | None = None
    size: tuple[float, float] | None = None  # width, height
    certainty: Certainty | None = None  # only beside a logprob
    alternatives: tuple[Alternative, ...] = ()
    piece: bytes = b""
