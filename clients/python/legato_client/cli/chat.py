"""`legato chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from legato_client import (
    Client,
    Finished,
    LegatoError,
    Message,
    Options,
    QueryResult,
    QueryTask,
    Sampling,
)
from legato_client.cli import arguments, show
from legato_client.cli.ask import REASONING
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal, hint_of

_HELP = """\
/image FILE   start a new conversation with this image; without FILE: without an image
/system TEXT  start a new conversation with this instruction
/reset        start a new conversation
/quit         end, as Ctrl-D; Ctrl-C stops an answer"""


def add_command(commands: Any) -> None:
    indented = "\n".join(f"  {line}" for line in _HELP.splitlines())
    parser = commands.add_parser(
        "chat",
        help="hold a conversation, about an image if one is named",
        description="Ask again and again; the model sees the conversation so far. Questions are "
        f"lines of standard input, or commands:\n{indented}",
        example="legato chat street.jpg",
    )
    parser.add_argument("image", nargs="?", help="JPEG, PNG or WebP file")
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="instruction for the whole conversation"
    )
    parser.add_argument("--reasoning", action="store_true", help=REASONING)
    arguments.add_sampling_options(parser)
    arguments.add_server_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Run the command; with `--json` each answer is one line."""
    talk = ChatHistory(args.system, _image(args.image), args.reasoning, arguments.sampling_of(args))
    person = sys.stdin.isatty() and terminal.is_interactive
    if person:
        importlib.import_module("readline")  # input() edits lines and remembers them
        terminal.line(terminal.dim("/help tells what else can be typed"))
    with arguments.connect(args) as client:
        has_notice = False
        for line in _lines(person):
            try:
                if line == "/quit":
                    return
                if line.startswith("/"):
                    _command(talk, line, terminal)
                elif line:
                    _answer(client, talk, line, arguments.options_of(args), terminal)
                    if not has_notice:
                        show.show_notice(terminal, client)
                        has_notice = True
            except (LegatoError, CommandError) as error:
                if not person:
                    raise
                hint = hint_of(error) if isinstance(error, LegatoError) else ""
                terminal.line(f"{error}{hint}")


@dataclasses.dataclass(slots=True)
class ChatHistory:
    """Messages so far, without unanswered questions."""

    system: str
    image: bytes | None
    reasoning: bool
    sampling: Sampling
    history: list[Message] = dataclasses.field(default_factory=list)

    def task(self, question: str) -> QueryTask:
        said = (Message("system", self.system),) if self.system else ()
        image = None if self.history else self.image
        asked = Message("user", question if image is None else (image, question))
        return QueryTask(
            reasoning=self.reasoning,
            sampling=self.sampling,
            messages=(*said, *self.history, asked),
        )

    def add(self, task: QueryTask, answer: str) -> None:
        self.history += (task.messages[-1], Message("assistant", answer))


def _answer(
    client: Client, talk: ChatHistory, question: str, options: Options, terminal: Terminal
) -> None:
    """Print the answer; Ctrl-C ends it, and the question is forgotten."""
    task = talk.task(question)
    printer = show.EventPrinter(terminal)
    events = client.generate(None, task, options=options)
    try:
        for event in events:
            printer.show(event)
            if isinstance(event, Finished) and isinstance(event.result, QueryResult):
                talk.add(task, event.result.answer)
                terminal.document({"question": question, "answer": event.result.answer})
    except KeyboardInterrupt:
        if not terminal.is_interactive:
            raise
        terminal.line(f"\n{terminal.dim('stopped: this question is not part of the conversation')}")
    finally:
        events.close()


def _command(talk: ChatHistory, line: str, terminal: Terminal) -> None:
    """Carry out a command. Raises CommandError if it is unknown or its file unreadable."""
    name, _, rest = line.partition(" ")
    match name:
        case "/image":
            talk.image = _image(rest.strip() or None)
        case "/system":
            talk.system = rest.strip()
        case "/reset":
            pass
        case _:
            if name != "/help":
                raise CommandError(f"no such command: {name}\n{_HELP}", ExitCode.USAGE)
            terminal.line(_HELP)
            return
    talk.history.clear()


def _image(name: str | None) -> bytes | None:
    return None if name is None else arguments.read_image(name)


def _lines(person: bool) -> Iterator[str]:
    if not person:
        yield from (line.strip() for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
