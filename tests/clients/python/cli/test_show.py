"""Answers as they arrive on a terminal."""

from __future__ import annotations

import io

import pytest
from legato_client import Finished, QueryResult, ResponseInfo, TextDelta
from legato_client.cli.show import EventPrinter
from legato_client.cli.terminal import Terminal

RESULT = Finished(QueryResult("three", None, ResponseInfo("r", "tiny", "stop")))


@pytest.mark.parametrize("events", [[TextDelta("th"), TextDelta("ree"), RESULT], [RESULT]])
def test_words_are_shown_once(events):
    """Those that stream as they come, the others with the end of the answer."""
    out = io.StringIO()
    printer = EventPrinter(Terminal(False, out))
    for event in events:
        printer.show(event)
    assert out.getvalue().splitlines() == ["three", "stop, tiny"]
