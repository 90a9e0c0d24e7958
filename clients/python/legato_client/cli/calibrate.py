"""`legato calibrate`: what a model's confidences are worth."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from legato_client import Client
from legato_client.batch.output import replacing
from legato_client.calibration import fit as fits
from legato_client.calibration.labelled import (
    ANNOTATIONS,
    LabelledFolder,
    UnusableLabels,
    read_labels,
)
from legato_client.calibration.scored import SKILLS, NoCertainties, Scored, score
from legato_client.cli import arguments, forward
from legato_client.cli.exits import CommandError, ExitCode
from legato_client.cli.local_server import LocalServer
from legato_client.cli.terminal import Terminal

FILE_NAME = "confidence.json"

_FEWEST = 50
"""Objects, right and wrong ones together, that a fit needs."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="fit a model's confidences to how often they are right",
        description="Ask about every picture of a labelled folder, compare the answers with its "
        "boxes, and write what makes the confidences shares of right objects. Servers read the "
        "file beside the weights when they start.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="pictures")
    add(
        "--annotations",
        type=Path,
        metavar="FILE.json",
        help=f"boxes in COCO's form, default: {ANNOTATIONS} in the folder",
    )
    add(
        "--weights",
        type=Path,
        metavar="PATH",
        help="start a server with these weights; else the running one is asked",
    )
    add("--model", default="", help="a served model; with --weights as of `legato serve`")
    add("--tokenizer", default="", metavar="FILE", help="with --weights: as of `legato serve`")
    add(
        "--output",
        type=Path,
        metavar="FILE.json",
        help=f"default: {FILE_NAME} beside the weights, else here",
    )
    add("--name", default="", help="of the set that was fitted on, default: the folder's")
    add("--skills", nargs="+", choices=SKILLS, default=["detect", "point"], metavar="SKILL")
    add(
        "--absent",
        type=arguments.count,
        default=1,
        metavar="N",
        help="categories that a picture lacks and is asked for all the same, default %(default)s",
    )
    add(
        "--parallel", type=arguments.at_least_one, default=4, metavar="N", help="pictures at a time"
    )
    add("--start-timeout", type=arguments.positive, default=300.0, metavar="SECONDS")
    arguments.add_server_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    labels = _labels(args)
    with _client(args, terminal) as client:
        found = _score(args, client, labels, terminal)
    fitted = {skill: _fit(skill, found) for skill in args.skills}
    path = args.output or _beside(args.weights) / FILE_NAME
    document = {
        "fitted_on": f"{args.name or args.folder.resolve().name}, {len(labels.pictures)} pictures",
        "fitted_at": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "skills": {
            skill: {"temperature": round(each.temperature, 4), "offset": round(each.offset, 4)}
            for skill, each in fitted.items()
        },
    }
    try:
        with replacing(path) as part:
            part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    _report(found, fitted, path, terminal)


def _labels(args: argparse.Namespace) -> LabelledFolder:
    annotations = args.annotations or args.folder / ANNOTATIONS
    try:
        return read_labels(args.folder, annotations, absent=args.absent)
    except UnusableLabels as error:
        raise CommandError(str(error), ExitCode.USAGE) from None


@contextlib.contextmanager
def _client(args: argparse.Namespace, terminal: Terminal) -> Iterator[Client]:
    if args.weights is None:
        with arguments.connect(args) as client:
            yield client
        return
    forward.require_linux("calibrate --weights")
    forward.require_engine("calibrate --weights")
    options = ["--weights", str(args.weights)]
    for name in ("model", "tokenizer"):
        if value := getattr(args, name):
            options += [f"--{name}", value]
    with LocalServer(options) as server:
        with terminal.progress("starting the server") as update:
            server.wait_until_serving(args.start_timeout, update)
        with Client(server.target, timeout=args.timeout) as client:
            yield client


def _score(
    args: argparse.Namespace, client: Client, labels: LabelledFolder, terminal: Terminal
) -> list[Scored]:
    model = "" if args.weights else args.model
    with terminal.counting("pictures", len(labels.pictures), 0) as tell:
        try:
            return score(
                client, labels.pictures, args.skills, model=model, parallel=args.parallel, tell=tell
            )
        except NoCertainties:
            raise CommandError(
                "the server does not tell how sure its model is of tokens: it is older than this "
                "client, or its model has no confidences"
            ) from None
        except OSError as error:
            raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None


def _fit(skill: str, found: Sequence[Scored]) -> fits.Fit:
    pairs = _pairs(skill, found)
    if len(pairs) < _FEWEST:
        raise CommandError(
            f"{len(pairs)} objects were found by {skill}; a fit needs {_FEWEST}: label more "
            "pictures, or leave the skill out of --skills"
        )
    return fits.fit(pairs)


def _pairs(skill: str, found: Sequence[Scored]) -> list[tuple[float, bool]]:
    return [(each.score, each.right) for each in found if each.skill == skill]


def _report(
    found: Sequence[Scored], fitted: dict[str, fits.Fit], path: Path, terminal: Terminal
) -> None:
    rows: list[dict[str, Any]] = []
    for skill, each in fitted.items():
        pairs = _pairs(skill, found)
        rows.append(
            {
                "skill": skill,
                "objects": len(pairs),
                "right": sum(right for _, right in pairs),
                "temperature": each.temperature,
                "offset": each.offset,
                "ece_before": fits.calibration_error(fits.Fit(), pairs),
                "ece_after": fits.calibration_error(each, pairs),
            }
        )
    terminal.table(tuple(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
    terminal.line(f"written {path}; the error is of the set that was fitted on: measure on another")
    terminal.document({"output": str(path), "skills": rows})


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _beside(weights: Path | None) -> Path:
    if weights is None:
        return Path()
    return weights if weights.is_dir() else weights.parent
