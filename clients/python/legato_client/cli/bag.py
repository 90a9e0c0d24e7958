"""`legato bag`: the images of a ROS 2 bag, and a bag of answers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato_client import Client, LegatoError, Result
from legato_client._images.sources import ImageInput
from legato_client.batch import tasks
from legato_client.batch.output import replacing
from legato_client.batch.run import Asking, is_of_the_picture
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, ExitCode, of_file
from legato_client.cli.terminal import Terminal

if TYPE_CHECKING:
    from legato_client.ros.bag import Answering, Count

_PARALLEL = 8
_MOST_PROBLEMS = 10


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bag",
        help="ask about the images of a ROS 2 bag, and write a bag of answers",
        description="Ask about every image of a topic in a bag of ROS 2 and write what is found, "
        "as vision_msgs/Detection2DArray with the images' stamps. ROS is not needed.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="IN.mcap")
    add("--topic", required=True, metavar="TOPIC", help="sensor_msgs/Image or CompressedImage")
    arguments.add_task_options(parser, places=True)
    add("--out", type=Path, required=True, metavar="OUT.mcap")
    add("--detections", default="/legato/detections", metavar="TOPIC",
        help="of the answers, default %(default)s")  # fmt: skip
    add("--draw", default="", metavar="TOPIC",
        help="also images with boxes, sensor_msgs/CompressedImage")  # fmt: skip
    add("--copy", action="append", default=[], metavar="PATTERN",
        help="also copy topics of the bag, as '/tf*' or '*'; may be repeated")  # fmt: skip
    add("--absent-score", type=float, default=math.nan, metavar="S",
        help="score of what has no confidence, default NaN")  # fmt: skip
    add("--parallel", type=arguments.at_least_one, default=_PARALLEL, metavar="N",
        help="images that are asked about at the same time, default %(default)s")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Raises CommandError, at the end too where images failed."""
    try:
        from legato_client.ros import bag
    except ModuleNotFoundError as error:
        problem = f"bags need {error.name}: {forward.hint('ros')}"
        raise CommandError(problem, ExitCode.USAGE) from None
    try:
        count = _run(args, terminal)
    except bag.BagRefused as error:
        raise CommandError(str(error), ExitCode.USAGE) from None
    except OSError as error:
        raise of_file(error) from None
    _report(args, count, terminal)


def _run(args: argparse.Namespace, terminal: Terminal) -> Count:
    from legato_client.ros import bag

    asked = arguments.tasks_of(args)
    if not tasks.have_places(asked.values()):
        raise bag.BagRefused(f"a bag has room for boxes and points: {tasks.names()}")
    if args.out.exists() and args.out.samefile(args.source):
        raise bag.BagRefused(f"{args.out} is the bag itself: name another file")
    topics = bag.Topics(args.topic, args.detections, args.draw, tuple(args.copy))
    with bag.Bag(args.source, args.topic) as source, arguments.connect(args) as client:
        asking = Asking(client, tuple(asked.values()), arguments.options_of(args))
        answering = bag.Answering(
            _asker(asking), topics, parallel=args.parallel, absent_score=args.absent_score
        )
        with terminal.counting("images", source.num_images, 0) as tell:
            _write(answering, source, args.out, tell, _giving_up(asking, client))
    return answering.count


def _write(answering: Answering, source: Any, out: Path, tell: Any, give_up: Any) -> None:
    with replacing(out) as part, part.open("wb") as file:
        answering.perform(source, file, tell, give_up)


def _asker(asking: Asking) -> Any:
    def ask(image: ImageInput) -> tuple[Result | LegatoError, ...]:
        try:
            return asking.ask(image)
        except LegatoError as error:
            if is_of_the_picture(error):
                raise ValueError(str(error)) from error
            raise

    return ask


def _giving_up(asking: Asking, client: Client) -> Any:
    def give_up() -> None:
        asking.end()
        client.close()

    return give_up


def _report(args: argparse.Namespace, count: Count, terminal: Terminal) -> None:
    terminal.line(
        f"{count.images - count.failed} images answered in {args.out}, "
        f"{count.detections} detections, {count.copied} messages copied"
    )
    for problem in count.problems[:_MOST_PROBLEMS]:
        terminal.line(problem)
    terminal.document(
        {
            "output": str(args.out),
            "images": count.images,
            "failed": count.failed,
            "detections": count.detections,
            "copied": count.copied,
            "problems": count.problems,
        }
    )
    if count.failed:
        raise CommandError(f"{count.failed} of {count.images} images failed")
