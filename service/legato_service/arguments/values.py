"""What the words of options may be."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable

from legato_engine.config import MODELS, TEST_MODELS, max_block_size
from legato_engine.errors import InvalidField

Add = Callable[..., argparse.Action]
"""`add_argument` of a parser or of a group."""


def model(text: str) -> str:
    if text not in (*MODELS, *TEST_MODELS):
        near = difflib.get_close_matches(text, MODELS, n=1)
        raise argparse.ArgumentTypeError(
            f"no model is called {text!r}"
            + (f", but {near[0]!r} is" if near else "")
            + f"; there are {', '.join(MODELS)}"
        )
    return text


def speculation(text: str) -> str:
    try:
        max_block_size(text)
    except InvalidField as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def fraction(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError("must be above 0 and below 1")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return number


def whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be finite and not negative")
    return number


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
