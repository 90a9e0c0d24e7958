"""Commands that ask about an image."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legato_client import Client, Event, Finished, Options, Result, Task
from legato_client._proto import skills
from legato_client.cli import arguments, forward, show
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal

REASONING = "let the model reason first, and show its reasoning"
_IMAGE = "JPEG, PNG or WebP file, or - for standard input"
_EXAMPLES = {
    "detect": 'legato detect street.jpg "traffic light" --output found.png',
    "point": "legato point street.jpg door",
    "segment": "legato segment street.jpg bus --output outline.png",
    "caption": "legato caption street.jpg --length short",
    "query": 'legato query street.jpg "What colour is the bus?"',
}


def add_command(commands: Any) -> None:
    for skill in skills.SKILLS:
        parser = commands.add_parser(
            skill.name,
            help=skill.help,
            description=f"{skill.help[0].upper()}{skill.help[1:]}.",
            example=_EXAMPLES[skill.name],
        )
        _add_fields(parser, skill)
        _add_output(parser)
        arguments.add_sampling_options(parser)
        arguments.add_server_options(parser)
        parser.set_defaults(run=run, skill=skill)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.stream and terminal.json_output:
        raise CommandError("--stream and --json exclude each other", ExitCode.USAGE)
    if args.output is not None and len(args.image) != 1:
        raise CommandError("--output needs one image to draw on", ExitCode.USAGE)
    if args.output is not None:
        check_output(args.output)
    images = [arguments.read_image(name) for name in args.image]
    streaming = terminal.is_interactive if args.stream is None else args.stream
    printer = show.EventPrinter(terminal)
    watch = printer.show if streaming else None
    with arguments.connect(args) as client, arguments.naming_options(args, args.image):
        result = ask(client, images or None, task_of(args), arguments.options_of(args), watch)
        if not streaming:
            show.show_result(terminal, result)
        show.show_notice(terminal, client)
    if args.output is not None:
        save(args.output, images[0], result)
        terminal.line(f"saved {args.output}")
    terminal.document(document(result))


def ask(
    client: Client,
    image: bytes | list[bytes] | None,
    task: Task,
    options: Options,
    watch: Callable[[Event], None] | None,
) -> Result:
    """Run the task; call `watch` with each event as it arrives."""
    result: Result | None = None
    for event in client.generate(image, task, options=options):
        if watch is not None:
            watch(event)
        if isinstance(event, Finished):
            result = event.result
    assert result is not None, "a stream ends with Finished or raises"
    return result


def task_of(args: argparse.Namespace) -> Task:
    """Build the task from arguments named like its fields."""
    given = {name: value for name, value in vars(args).items() if args.skill.takes(name)}
    task: Task = args.skill.task(**given, sampling=arguments.sampling_of(args))
    return task


def document(result: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    del fields["task_id"]
    return {"task": skills.of(result).name, **fields}


def check_output(path: Path) -> None:
    """Check before any work that a drawing can be saved."""
    forward.require("drawings", "cli", "PIL")
    if not path.parent.is_dir():
        raise CommandError(f"cannot write {path}: no folder {path.parent}", ExitCode.USAGE)


def save(path: Path, image: bytes, *results: Result) -> None:
    from legato_client import draw  # needs Pillow

    marks = [mark for result in results for mark in draw.marks_of(result)]
    lines = [text for result in results if (text := show.text_of(result))]
    try:
        draw.annotate(image, marks, lines=lines).save(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def _add_fields(parser: argparse.ArgumentParser, skill: skills.AnySkill) -> None:
    """Add an argument for each field of the skill's task."""
    if skill is skills.QUERY:
        parser.add_argument(
            "image", nargs="*", help=f"{_IMAGE}; none, or several for a model that takes them"
        )
        parser.add_argument("question", type=arguments.text, help="question to answer")
        parser.add_argument("--reasoning", action="store_true", help=REASONING)
        arguments.add_format_options(parser)
        return
    parser.add_argument("image", nargs=1, help=_IMAGE)
    if skill.takes("length"):
        parser.add_argument(
            "--length", choices=skill.choices, default="normal", help="length of the caption"
        )
    if skill.takes("object"):
        parser.add_argument(
            "object", type=arguments.text, help='what to look for, such as "red cup"'
        )
    if skill.takes("max_objects"):
        arguments.add_object_options(parser)
    if skill.takes("order"):
        parser.add_argument(
            "--order",
            choices=("model", "confidence"),
            default="model",
            help="order of the objects: as the model finds them, or highest confidence first",
        )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=arguments.image,
        metavar="FILE",
        help=f"save the annotated image: {', '.join(arguments.IMAGES)}",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="show the answer as it is generated, default: on a terminal",
    )
