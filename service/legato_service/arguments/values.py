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
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, and is {value:g}")
    return value


def share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 to 1, and is {value:g}")
    return value


def whole(text: str) -> int:
    if (value := _integer(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, and is {value}")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, and is {value:g}")
    return value


def above_zero(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, and is {value:g}")
    return value


def positive(text: str) -> int:
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, and is {value}")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would name the function that reads it
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
