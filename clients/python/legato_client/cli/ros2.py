"""`legato ros2`: a node without an installation of ROS 2."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from legato_client.batch import tasks
from legato_client.cli import arguments, forward, settings
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal
from legato_client.cli.watch import server_notices
from legato_client.stream.feed import FeedSettings
from legato_client.stream.frames import summary

_PREDICTION_RATE = 30.0  # Hz
_STATE_TIMEOUT = 2.0  # seconds; a question about the engine


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "ros2",
        help="answer the images of a ROS 2 topic",
        description="Subscribe to ROS 2 images and publish the results as "
        "vision_msgs/Detection2DArray, until SIGINT or SIGTERM. ROS is not needed: this is a "
        "participant of DDS. CYCLONEDDS_URI configures the network.",
        example="legato ros2 --image /camera/image_raw --task detect:person --track",
    )
    add = parser.add_argument
    add("--image", required=True, metavar="TOPIC",
        help="topic of sensor_msgs/Image or CompressedImage")  # fmt: skip
    add("--type", choices=("raw", "compressed"),
        help="messages of that topic, default: compressed if its name ends in it")  # fmt: skip
    arguments.add_task_options(parser, places=True)
    add("--detections", default="/legato/detections", metavar="TOPIC",
        help="topic of vision_msgs/Detection2DArray, default %(default)s")  # fmt: skip
    add("--info", default="/legato/vision_info", metavar="TOPIC",
        help="topic of vision_msgs/VisionInfo: the model, latched, "
        "default %(default)s")  # fmt: skip
    add("--diagnostics", default="/diagnostics", metavar="TOPIC",
        help="topic of diagnostic_msgs/DiagnosticArray, default %(default)s")  # fmt: skip
    add("--period", type=arguments.positive, default=1.0, metavar="SECONDS",
        help="time between two diagnostics, default %(default)g")  # fmt: skip
    add("--name", default="legato", metavar="NAME",
        help="name in diagnostics, default %(default)s")  # fmt: skip
    add("--domain", type=arguments.count, metavar="N",
        help="number of the DDS domain, default: ROS_DOMAIN_ID, else 0")  # fmt: skip
    add("--max-age", type=arguments.positive, metavar="SECONDS",
        help="drop images that get older than this, default: none")  # fmt: skip
    add("--by-arrival", action="store_true",
        help="ages count from an image's arrival, not its stamp: for simulated time")  # fmt: skip
    add("--absent-score", type=float, default=math.nan, metavar="S",
        help="score of results without confidence, default NaN")  # fmt: skip
    add("--track", action="store_true",
        help="follow detected objects from image to image: the id of a Detection2D")  # fmt: skip
    add("--predictions", default="", metavar="TOPIC",
        help="with --track: topic of vision_msgs/Detection2DArray with the tracked objects where "
        "they are now, default: none")  # fmt: skip
    add("--prediction-rate", type=arguments.positive, default=_PREDICTION_RATE, metavar="HZ",
        help="messages of --predictions per second, default %(default)g")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("ROS 2", "dds", "cyclonedds", "PIL")
    from cyclonedds.core import DDSException

    if args.predictions and not args.track:
        raise CommandError("--predictions needs --track", ExitCode.USAGE)
    asked = arguments.tasks_of(args)
    if not tasks.have_places(asked.values()):
        problem = f"the message has room for boxes and points: {tasks.names()}"
        raise CommandError(problem, ExitCode.USAGE)
    how = FeedSettings(asked, False, args.max_age, args.model, args.adapter, args.name, args.track)
    try:
        with settings.reporting(ValueError):
            _run(args, how, terminal)
    except DDSException as error:
        raise CommandError(f"DDS: {error}") from None


def _run(args: argparse.Namespace, asked: FeedSettings, terminal: Terminal) -> None:
    from legato_client.ros.node import Node, Parameters

    compressed = args.image.endswith("/compressed") if args.type is None else None
    parameters = Parameters(
        image=args.image,
        compressed=args.type == "compressed" if compressed is None else compressed,
        detections=args.detections,
        info=args.info,
        diagnostics=args.diagnostics,
        name=args.name,
        domain=_domain(args.domain),
        by_arrival=args.by_arrival,
        absent_score=args.absent_score,
        period=args.period,
        predictions=args.predictions,
        prediction_rate=args.prediction_rate,
    )
    watching = argparse.Namespace(**{**vars(args), "timeout": _STATE_TIMEOUT})
    with (
        arguments.connect(args) as client,
        arguments.connect(watching, as_operator=True) as operator,
    ):
        notices = server_notices(terminal, args.server)
        node = Node(client, operator, asked, parameters, notices)
        terminal.line(f"{args.image} to {args.detections}, domain {parameters.domain}")
        with settings.calling(node.stop):
            node.run()
    totals = node.counters.totals()
    for line in summary(totals):
        terminal.line(line)
    terminal.document(totals.document())


def _domain(given: int | None) -> int:
    """Return the DDS domain. Raises ValueError for a variable that is not a number."""
    if given is not None:
        return given
    text = os.environ.get("ROS_DOMAIN_ID") or "0"
    if not text.isdecimal():
        raise ValueError(f"ROS_DOMAIN_ID is a number, not {text!r}")
    return int(text)
