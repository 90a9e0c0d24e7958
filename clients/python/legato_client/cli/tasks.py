"""The commands that ask about an image."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legato_client import (
    CaptionTask,
    Client,
    DetectTask,
    Event,
    Finished,
    Options,
    PointTask,
    QueryTask,
    Result,
    SegmentTask,
    Task,
)
from legato_client.cli import arguments, install, show
from legato_client.cli.exits import CommandError, ExitCode
from legato_client.cli.terminal import Terminal


def add_command(commands: Any) -> None:
    detect = commands.add_parser("detect", help="box every instance of an object")
    _add_object(detect, count=True)
    point = commands.add_parser("point", help="point at every instance of an object")
    _add_object(point, count=True)
    segment = commands.add_parser("segment", help="outline an object")
    _add_object(segment, count=False)
    caption = commands.add_parser("caption", help="describe the image")
    caption.add_argument("image", help="a JPEG, PNG or WebP file, or - for standard input")
    caption.add_argument("--length", choices=("short", "normal", "long"), default="normal")
    query = commands.add_parser("query", help="answer a question, with or without an image")
    query.add_argument("image", nargs="?", help="a file, or - for standard input")
    query.add_argument("question")
    query.add_argument("--reasoning", action="store_true", help="think first, and show it")
    for name, parser in (
        ("detect", detect),
        ("point", point),
        ("segment", segment),
        ("caption", caption),
        ("query", query),
    ):
        _add_output(parser)
        arguments.add_sampling_options(parser)
        arguments.add_server_options(parser)
        parser.set_defaults(run=run, command=name)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.stream and terminal.json_output:
        raise CommandError("--stream and --json exclude each other", ExitCode.USAGE)
    if args.output is not None and args.image is None:
        raise CommandError("--output needs an image to draw on", ExitCode.USAGE)
    image = _read(args.image)
    streaming = terminal.interactive if args.stream is None else args.stream
    printer = show.EventPrinter(terminal)
    watch = printer.show if streaming else None
    with arguments.connect(args) as client:
        result = ask(client, image, task_of(args), arguments.options_of(args), watch)
    if not streaming:
        show.show_result(terminal, result)
    if args.output is not None and image is not None:
        save(args.output, image, result)
        terminal.line(f"saved {args.output}")
    terminal.document(document(args.command, result))


def ask(
    client: Client,
    image: bytes | None,
    task: Task,
    options: Options,
    watch: Callable[[Event], None] | None,
) -> Result:
    """`watch` sees each event as it arrives."""
    result: Result | None = None
    for event in client.generate(image, task, options=options):
        if watch is not None:
            watch(event)
        if isinstance(event, Finished):
            result = event.result
    assert result is not None, "a stream ends with Finished or raises"
    return result


def task_of(args: argparse.Namespace) -> Task:
    sampling = arguments.sampling_of(args)
    match args.command:
        case "detect":
            return DetectTask(
                args.object,
                args.max_objects,
                sampling,
                min_confidence=args.min_confidence,
                order=args.order,
            )
        case "point":
            return PointTask(
                args.object,
                args.max_objects,
                sampling=sampling,
                min_confidence=args.min_confidence,
                order=args.order,
            )
        case "segment":
            return SegmentTask(args.object, sampling=sampling)
        case "caption":
            return CaptionTask(args.length, sampling)
        case _:
            return QueryTask(args.question, args.reasoning, sampling=sampling)


def document(command: str, result: Result) -> dict[str, Any]:
    """The task's name beside the fields of the result."""
    fields = dataclasses.asdict(result)
    del fields["task_id"]
    return {"task": command, **fields}


def save(path: Path, image: bytes, *results: Result) -> None:
    try:
        from legato_client import draw
    except ModuleNotFoundError as error:
        raise CommandError(f"drawing needs Pillow: {install.hint('cli')}") from error
    marks = [mark for result in results for mark in draw.marks_of(result)]
    lines = [text for result in results if (text := show.text_of(result))]
    try:
        draw.annotate(image, marks, lines=lines).save(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def _add_object(parser: argparse.ArgumentParser, *, count: bool) -> None:
    parser.add_argument("image", help="a JPEG, PNG or WebP file, or - for standard input")
    parser.add_argument("object", help='what to look for, such as "red cup"')
    if count:
        parser.add_argument("--max-objects", type=arguments.count, metavar="N")
        arguments.add_min_confidence(parser)
        parser.add_argument(
            "--order",
            choices=("model", "confidence"),
            default="model",
            help="of the objects; confidence: the greatest first",
        )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=arguments.picture,
        metavar="FILE",
        help=f"save the annotated image here: {', '.join(arguments.PICTURES)}",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="show the answer as it is made; default: on a terminal",
    )


def _read(name: str | None) -> bytes | None:
    if name is None:
        return None
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}", ExitCode.USAGE) from error
