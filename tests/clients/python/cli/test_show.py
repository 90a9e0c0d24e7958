"""Answers as they arrive on a terminal."""

from __future__ import annotations

import io
import json
import re

import pytest
from legato_client import Client, Finished, LegatoError, QueryResult, ResponseInfo, TextDelta
from legato_client.cli.show import EventPrinter, show_notice
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


HOSTILE = [
    "\x1b[2J",  # clears
    "\x1b]0;title\x07",
    "\x1b]8;;https://a.example\x1b\\link",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\x1bc",  # resets
    "\x1b[8m",  # conceals
    "\x1bP1$r\x1b\\",
    "a\rb",
    "\x08\x08",
    "\x7f",
    "\x1b",
]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_moves_no_terminal(text):
    """Names, answers and errors of a server reach a terminal without what it would act on."""
    for json_output in (False, True):
        out, err = io.StringIO(), io.StringIO()
        terminal = Terminal(json_output, out, err)
        terminal.line(f"before{text}after")
        terminal.heading(text)
        terminal.table(("name",), [(text,)])
        terminal.document({"name": text})
        terminal.fail(LegatoError(f"before{text}after", request_id=text))
        assert not CONTROL.search(out.getvalue() + err.getvalue())
        if json_output:
            assert json.loads(out.getvalue()) == {"name": text}  # nothing is lost
        else:
            assert "before" in out.getvalue()
            assert "after" in out.getvalue()


def test_pieces_of_an_answer_move_no_terminal():
    """A sequence that arrives in pieces is none either."""
    out = io.StringIO()
    terminal = Terminal(False, out)
    for piece in "\x1b[2J\x1b]0;t\x07":
        terminal.write(piece)
    assert not CONTROL.search(out.getvalue())


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_models_limits_once(server):
    """Limits that several models share are one line on a terminal, and nothing elsewhere."""
    for out, shown in ((Screen(), 1), (io.StringIO(), 0)):
        with Client(server.target) as client:
            show_notice(Terminal(False, out), client)
        assert out.getvalue().count("It knows drawings only.") == shown


def test_our_own_styles_reach_the_terminal():
    """Headings of a terminal stay bold."""
    out = Screen()
    Terminal(False, out).heading("name\x1b[2J")
    assert out.getvalue() == "\x1b[1mname\x1b[0m\n"
