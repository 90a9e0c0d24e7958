"""`legato run`: the same tasks on many images."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from legato_client import LegatoError, Task
from legato_client.batch import images, tasks
from legato_client.batch.images import RunError
from legato_client.batch.output import Output
from legato_client.batch.output import write as write_coco
from legato_client.batch.run import perform
from legato_client.batch.video import FrameChoice
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, reporting
from legato_client.cli.show import show_notice
from legato_client.cli.terminal import Terminal

_PARALLEL = 8


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run the same tasks on many images; an interrupted run can be continued",
        description="Ask the same about every image of folders, files and videos. Each answer is "
        "a line of JSON. The same command again continues where the last one ended.",
        example="legato run photos/ --task detect:person --task caption --output results.jsonl",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="FOLDER|FILE|VIDEO|-",
        help="images, videos and folders of them; - reads names from standard input, one a line",
    )
    arguments.add_task_options(parser)
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="results, a line for each image",
    )
    add("--coco", type=Path, metavar="FILE.json", help="also write boxes and outlines, as COCO")
    add("--annotate", type=Path, metavar="FOLDER", help="also write annotated images")
    add("--sorted", action="store_true", help="order the lines by name at the end")
    add("--retry-failed", action="store_true", help="ask again about images that failed")
    add(
        "--parallel",
        type=arguments.at_least_one,
        default=_PARALLEL,
        metavar="N",
        help="number of images in flight, default %(default)s",
    )
    frames = parser.add_mutually_exclusive_group()
    frames.add_argument(
        "--every",
        type=arguments.at_least_one,
        default=1,
        metavar="N",
        help="ask about each Nth frame of a video, default %(default)s",
    )
    frames.add_argument(
        "--fps",
        type=arguments.positive,
        metavar="FPS",
        help="ask about at most this many frames per second of video, default: all",
    )
    parser.set_defaults(run=run)


@reporting(RunError)
def run(args: argparse.Namespace, terminal: Terminal) -> None:
    asked = _tasks(args)
    if args.coco and not any(map(tasks.object_of, asked.values())):
        raise RunError(f"--coco needs a task that gives boxes: {tasks.names(boxes=True)}")
    if args.annotate:
        forward.require("drawings", "cli", "PIL")
    names, total = _sources(args)
    start = time.monotonic()
    with Output(args.output, _settings(args)) as output:
        if args.retry_failed:
            output.drop_failed()
        before = len(output.done)
        choice, options = FrameChoice(args.every, args.fps), arguments.options_of(args)
        try:
            with (
                arguments.connect(args) as client,
                arguments.naming_options(args),
                terminal.counting("images", total, before) as count,
            ):
                chosen = images.images(names, choice)
                perform(client, asked, options, output, chosen, count, parallel=args.parallel)
                show_notice(terminal, client)
        except LegatoError:
            if new := len(output.done) - before:
                terminal.line(f"{new} images more are done; the same command continues from there")
            raise
        if args.sorted:
            output.sort()
        if args.annotate:
            from legato_client.batch.annotate import annotate  # needs Pillow

            with terminal.counting("drawings", len(output.done), 0) as count:
                for problem in annotate(output, args.annotate, choice, count):
                    terminal.line(f"not drawn: {problem}")
        boxes = write_coco(args.coco, output.lines(), asked) if args.coco else None
        _report(args, output, terminal, before, boxes, time.monotonic() - start)


def _tasks(args: argparse.Namespace) -> dict[str, Task]:
    try:
        return arguments.tasks_of(args)
    except ValueError as error:
        raise RunError(f"--task: {error}") from None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that change answers, named like the options."""
    sampling = dataclasses.asdict(arguments.sampling_of(args))
    return {
        "tasks": args.task,
        **{name.replace("_", "-"): value for name, value in sampling.items()},
        "max-objects": args.max_objects,
        "min-confidence": args.min_confidence,
        "model": args.model,
        "adapter": args.adapter,
        "every": args.every,
        "fps": args.fps,
    }


def _sources(args: argparse.Namespace) -> tuple[Iterable[str], int | None]:
    """Return the files to ask about, and how many images they are if that is known."""
    excluded = [args.annotate] if args.annotate else []
    names = images.files(args.sources, excluded, sys.stdin.buffer)
    if images.STANDARD_INPUT in args.sources:
        return names, None
    listed = list(names)
    if any(map(images.is_video, listed)):
        forward.require("videos", "video", "av", "PIL")
        return listed, None
    return listed, len(listed)


def _report(
    args: argparse.Namespace,
    output: Output,
    terminal: Terminal,
    before: int,
    boxes: int | None,
    seconds: float,
) -> None:
    done, failed = len(output.done), output.num_failed
    new = done - before
    terminal.line(f"{done} images in {args.output}, {new} of them new, in {seconds:.1f} s")
    if boxes is not None:
        terminal.line(f"{boxes} annotations in {args.coco}")
    terminal.document(
        {
            "output": str(args.output),
            "images": done,
            "new": new,
            "failed": failed,
            "annotations": boxes,
            "seconds": seconds,
        }
    )
    if failed:
        raise CommandError(
            f"{failed} of {done} images failed: see `error` in {args.output}; "
            "--retry-failed asks about them again"
        )
