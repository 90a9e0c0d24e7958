"""`legato bag`: answers about the images of a ROS 2 bag, written as a bag."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato_client.batch import tasks
from legato_client.batch.output import replacing
from legato_client.batch.run import BatchClient
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, ExitCode, reporting
from legato_client.cli.terminal import Terminal

if TYPE_CHECKING:
    from legato_client.ros.bag import BagCounts

_PARALLEL = 8
_MAX_PROBLEMS = 10


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bag",
        help="ask about the images of a ROS 2 bag, and write a bag of answers",
        description="Ask about every image of a topic in a ROS 2 bag and write the results, "
        "as vision_msgs/Detection2DArray with the images' stamps. ROS is not needed.",
        example="legato bag drive.mcap --image /camera/image_raw --task detect:person --output "
        "answers.mcap",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="BAG", help="MCAP file, or a folder of `ros2 bag record`")
    add("--image", required=True, metavar="TOPIC",
        help="topic of sensor_msgs/Image or CompressedImage")  # fmt: skip
    arguments.add_task_options(parser, places=True)
    add("--output", type=Path, required=True, metavar="FILE.mcap",
        help="bag to write")  # fmt: skip
    add("--detections", default="/legato/detections", metavar="TOPIC",
        help="topic of the answers, default %(default)s")  # fmt: skip
    add("--draw", default="", metavar="TOPIC",
        help="topic of annotated images, sensor_msgs/CompressedImage, default: none")  # fmt: skip
    add("--copy", action="append", default=[], metavar="PATTERN",
        help="also copy topics of the bag, as '/tf*' or '*'; may be repeated")  # fmt: skip
    add("--absent-score", type=float, default=math.nan, metavar="S",
        help="score of results without confidence, default NaN")  # fmt: skip
    add("--parallel", type=arguments.at_least_one, default=_PARALLEL, metavar="N",
        help="number of images in flight, default %(default)s")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("bags", "ros", "mcap", "mcap_ros2")
    if args.draw:
        forward.require("drawings", "cli", "PIL")
    from legato_client.ros import bag

    args.source = _file(args.source)
    with reporting(bag.BagError):
        count = _run(args, terminal)
    _report(args, count, terminal)


def _file(source: Path) -> Path:
    """Return the MCAP file, which may be the only one of a recorded folder."""
    if not source.is_dir():
        return source
    files = sorted(source.glob("*.mcap"))
    if len(files) != 1:
        problem = f"{source} has {len(files)} .mcap files: name one"
        raise CommandError(problem, ExitCode.USAGE)
    return files[0]


def _run(args: argparse.Namespace, terminal: Terminal) -> BagCounts:
    from legato_client.ros import bag

    asked = arguments.tasks_of(args)
    if not tasks.have_places(asked.values()):
        raise bag.BagError(f"a bag has room for boxes and points: {tasks.names()}")
    if args.output.exists() and args.output.samefile(args.source):
        raise bag.BagError(f"{args.output} is the bag itself: name another file")
    topics = bag.Topics(args.image, args.detections, args.draw, tuple(args.copy))
    with (
        bag.Bag(args.source, args.image) as source,
        arguments.connect(args) as client,
        arguments.naming_options(args),
    ):
        batch_client = BatchClient(client, tuple(asked.values()), arguments.options_of(args))
        answerer = bag.BagAnswerer(
            batch_client.ask, topics, parallel=args.parallel, absent_score=args.absent_score
        )

        def give_up() -> None:
            batch_client.end()
            client.close()

        with (
            terminal.counting("images", source.num_images, 0) as tell,
            replacing(args.output) as part,
            part.open("wb") as file,
        ):
            answerer.perform(source, file, tell, give_up)
    return answerer.count


def _report(args: argparse.Namespace, count: BagCounts, terminal: Terminal) -> None:
    terminal.line(
        f"{count.images - count.failed} images answered in {args.output}, "
        f"{count.detections} detections, {count.copied} messages copied"
    )
    for problem in count.problems[:_MAX_PROBLEMS]:
        terminal.line(problem)
    terminal.document({"output": str(args.output), **dataclasses.asdict(count)})
    if count.failed:
        raise CommandError(f"{count.failed} of {count.images} images failed")
