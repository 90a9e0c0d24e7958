"""What a person sees of a start."""

from __future__ import annotations

import io

import pytest
from legato_service.console import TerminalAnnouncer, example
from rich.console import Console

from tests.service.fakes import MODEL


@pytest.mark.parametrize(
    ("address", "tasks", "command"),
    [
        (
            "127.0.0.1:50051",
            ("query", "detect"),
            "legato detect photo.jpg cup --server 127.0.0.1:50051",
        ),
        ("0.0.0.0:7", ("query",), 'legato query "Why is the sky blue?" --server 127.0.0.1:7'),
        ("robot:7", ("caption", "detect"), "legato detect photo.jpg cup --server robot:7"),
    ],
)
def test_the_example_is_one_that_the_model_answers(address, tasks, command):
    """At an address that a client on this host can call."""
    assert example(address, tasks) == command


def test_a_start_ends_with_what_is_served():
    """The address, the model and a command to try."""
    shown = io.StringIO()
    announcer = TerminalAnnouncer(Console(file=shown, force_terminal=True, width=100))
    announcer.ready("127.0.0.1:7", [MODEL])
    assert MODEL.name in shown.getvalue()
    assert example("127.0.0.1:7", MODEL.tasks) in shown.getvalue()
