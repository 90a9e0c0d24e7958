"""`legato load`: load on a running server."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from legato.v1 import media_pb2, session_pb2

from legato_client import Options, Sampling, Task
from legato_client._grpc import channel
from legato_client._grpc.channel import to_bytes
from legato_client._images import sources
from legato_client._proto import requests, skills
from legato_client.cli import arguments
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal
from legato_client.load import report
from legato_client.load.plan import ARRIVALS, KINDS, LoadPlan
from legato_client.load.run import LoadFailed
from legato_client.load.run import run as run_load

_SIDE = 32  # pixels of the grey square shown without an image


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    plan = plan_of(args)
    try:
        with terminal.progress(f"{plan.kind} load on {plan.target} for {plan.seconds:g} s"):
            record = run_load(plan)
    except LoadFailed as error:
        raise CommandError(str(error), ExitCode.UNAVAILABLE) from None
    for line in report.summary(plan, record):
        terminal.line(line)
    terminal.table(report.HEADS, report.rows(record))
    figures = {"plan": _described(plan), **record.figures(plan.window)}
    terminal.document(figures)
    if args.output:
        prefix = Path(args.output)
        prefix.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
        prefix.with_suffix(".md").write_text(report.markdown(plan, record))


def plan_of(args: argparse.Namespace) -> LoadPlan:
    if args.warm_up >= args.seconds:
        raise CommandError("--warm-up must be shorter than --seconds", ExitCode.USAGE)
    image = _image(args)
    task = _task(args)
    path, request = _request(args, task, image)
    return LoadPlan(
        target=args.server,
        security=arguments.security_of(args),
        kind=args.kind,
        path=path,
        request=to_bytes(request),
        image=image.SerializeToString() if image is not None and args.kind == "session" else b"",
        rate=0.0 if args.closed else args.rate,
        arrivals=args.arrivals,
        in_flight=args.closed or 1,
        seconds=args.seconds,
        warm_up=args.warm_up,
        timeout=args.timeout,
        sessions=args.sessions,
        senders=args.processes,
        seed=args.seed,
    )


def _request(
    args: argparse.Namespace, task: Task, image: media_pb2.Image | None
) -> tuple[str, Message]:
    options = Options(model=args.model)
    if args.kind == "stream":
        return channel.GENERATE.path, requests.generate(image, task, options)
    if args.kind == "session":
        standing = requests.generate(None, task, options).task
        opened = session_pb2.SessionOpen(
            model=args.model,
            standing_tasks=[standing],
            frame_policy=session_pb2.FRAME_POLICY_EVERY_FRAME,
            stream_deltas=args.deltas,
        )
        return "", session_pb2.SessionRequest(open=opened)
    return channel.OF_SKILLS[args.task].path, requests.question(image, task, options)


def _task(args: argparse.Namespace) -> Task:
    sampling = Sampling(temperature=args.temperature, max_tokens=args.max_tokens)
    skill = skills.BY_NAME[args.task]
    subject = "" if skill.choices else args.text
    try:
        task: Task = skill.make(subject, sampling, max_objects=args.max_objects)
    except ValueError as error:
        raise CommandError(f"--text: {error}", ExitCode.USAGE) from None
    return task


def _image(args: argparse.Namespace) -> media_pb2.Image | None:
    """Read the image; None if none is given and none is needed."""
    if args.image:
        with arguments.readable_options():
            return sources.to_image(args.image)
    if args.task == "query" and args.kind != "session":
        return None
    image = media_pb2.Image()
    image.raw.layout.width = image.raw.layout.height = _SIDE
    image.raw.layout.format = media_pb2.PIXEL_FORMAT_MONO8
    image.raw.data = bytes(_SIDE * _SIDE)
    return image


def _described(plan: LoadPlan) -> dict[str, object]:
    """Describe the plan: bytes by their number, tokens not at all."""
    values = {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}
    values["security"] = plan.security.summary()
    return {
        name: len(value) if isinstance(value, bytes) else value for name, value in values.items()
    }


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "load",
        help="put load on a running server",
        description="Put load on a running server: requests at a rate that does not depend on its "
        "answers, each timed from when it was due.",
        example="legato load --server gpu-box:50051 --rate 50 --seconds 30 --task detect --text "
        "bus --image street.jpg",
    )
    parser.add_argument(
        "--output", metavar="PREFIX", default="", help="also write PREFIX.json and PREFIX.md"
    )
    _add_load(parser.add_argument_group("load").add_argument)
    arguments.add_server_options(parser)
    _add_request(parser.add_argument_group("the request, the same each time").add_argument)
    parser.set_defaults(run=run)


def _add_load(add: Callable[..., object]) -> None:
    add("--kind", choices=KINDS, default="unary", help="kind of the calls")
    add(
        "--rate",
        type=arguments.rate,
        metavar="RATE",
        default=100.0,
        help="requests per second, in all",
    )
    add("--arrivals", choices=ARRIVALS, default=ARRIVALS[0], help="distribution of the requests")
    add(
        "--closed",
        type=arguments.count,
        metavar="N",
        default=0,
        help="instead of a rate: N requests in flight at any time, to measure the maximum "
        "throughput; 0: off",
    )
    add("--seconds", type=arguments.rate, metavar="SECONDS", default=10.0, help="length of the run")
    add(
        "--warm-up",
        type=arguments.not_negative,
        metavar="SECONDS",
        default=2.0,
        help="first part of --seconds, which is not measured",
    )
    add(
        "--processes",
        type=arguments.at_least_one,
        metavar="N",
        default=1,
        help="number of sending processes",
    )
    add(
        "--sessions",
        type=arguments.at_least_one,
        metavar="N",
        default=1,
        help="number of open sessions, for --kind session",
    )
    add("--seed", type=int, metavar="N", default=0, help="number that repeats the arrivals")


def _add_request(add: Callable[..., object]) -> None:
    add("--task", choices=tuple(skills.BY_NAME), default="query", help="task of the request")
    add(
        "--text",
        metavar="TEXT",
        type=arguments.text,
        default="What is in the image?",
        help="question or object",
    )
    add(
        "--image",
        metavar="FILE",
        default="",
        help="image to ask about, default: a grey square where one is needed",
    )
    add(
        "--max-tokens",
        type=arguments.at_least_one,
        metavar="N",
        help="maximum length of an answer in tokens",
    )
    add(
        "--max-objects",
        type=arguments.at_least_one,
        metavar="N",
        help="maximum number of objects of a task",
    )
    add(
        "--temperature",
        type=arguments.not_negative,
        metavar="T",
        help="randomness of the answer, 0 or more",
    )
    add("--deltas", action="store_true", help="let sessions stream events too")
    add(
        "--model", default="", metavar="NAME", help="served model to ask, default: the server's own"
    )
