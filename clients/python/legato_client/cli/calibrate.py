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
from legato_client.calibration import scored
from legato_client.calibration.fit import Judgement, judge
from legato_client.calibration.scored import (
    ANNOTATIONS,
    SKILLS,
    LabelledImage,
    NoTokenCertainties,
    Scored,
    UnusableLabels,
    read_labels,
    score,
)
from legato_client.cli import arguments, forward
from legato_client.cli.demo import LocalServer
from legato_client.cli.settings import CommandError, reporting
from legato_client.cli.terminal import Terminal

FILE_NAME = "confidence.json"

_FEWEST = 50
"""Minimum number of objects, right and wrong, for a fit."""

_SAME_SET = "the errors are of the set that was fitted on: judge on another one with --test"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="fit a model's confidences to how often they are right",
        description="Ask about every image of a labelled folder, compare the answers with its "
        "boxes, and write a calibration of the confidences. Servers read the "
        "file beside the weights when they start. With --test only fits that better the "
        "confidences of other images are written.",
        example="legato calibrate labelled/ --test held-out/ --output confidence.json",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder of labelled images")
    add(
        "--annotations",
        type=Path,
        metavar="FILE.json",
        help=f"boxes in COCO's form, default: {ANNOTATIONS} in the folder",
    )
    add(
        "--test",
        type=Path,
        metavar="FOLDER",
        help="other labelled images: a skill whose fit does not help there is left out",
    )
    add(
        "--weights",
        type=Path,
        metavar="PATH",
        help="start a server with these weights; else the running one is asked",
    )
    add(
        "--model",
        default="",
        metavar="NAME",
        help="served model to ask; with --weights as of `legato serve`",
    )
    add("--tokenizer", default="", metavar="FILE", help="tokenizer.json to use, with --weights")
    add(
        "--output",
        type=Path,
        metavar="FILE.json",
        help=f"calibration to write, default: {FILE_NAME} beside the weights, else here",
    )
    add(
        "--objects",
        type=Path,
        metavar="FILE.jsonl",
        help="write every object that was found, with its certainties and whether it is right",
    )
    add(
        "--name",
        default="",
        metavar="NAME",
        help="name of the set that was fitted on, default: the folder's",
    )
    add(
        "--skills",
        nargs="+",
        choices=SKILLS,
        default=["detect", "point"],
        metavar="SKILL",
        help=f"skills to fit: {', '.join(SKILLS)}",
    )
    add(
        "--absent",
        type=arguments.count,
        default=1,
        metavar="N",
        help="number of categories that an image lacks and is asked for all the same",
    )
    add("--parallel", type=arguments.at_least_one, default=4, metavar="N",
        help="number of images in flight")  # fmt: skip
    add("--start-timeout", type=arguments.positive, default=300.0, metavar="SECONDS",
        help="time in which a started server must be ready, default %(default)g")  # fmt: skip
    arguments.add_server_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    labels = _labels(args.folder, args)
    held_out = _labels(args.test, args) if args.test else None
    with _client(args, terminal) as client:
        found = _score(args, client, labels, terminal)
        tested = _score(args, client, held_out, terminal) if held_out else None
    if args.objects:
        sets = {"fit": found, "test": tested or []}
        told = [line for name, some in sets.items() for line in scored.lines(name, some)]
        _write(args.objects, "".join(f"{line}\n" for line in told))
    fitted = {skill: _fit(skill, found) for skill in args.skills}
    judging = found if tested is None else tested
    judged = {skill: judge(each, _of(skill, judging)) for skill, each in fitted.items()}
    kept = [skill for skill in fitted if tested is None or judged[skill].is_better]
    weights = args.weights or Path()
    path = args.output or (weights if weights.is_dir() else weights.parent) / FILE_NAME
    _report(fitted, judged, kept, path if kept else None, terminal)
    if not kept:
        raise CommandError(
            f"no fit betters the confidences of {args.test} by more than its error, so none is "
            "written: label more images, or leave the scores as they are"
        )
    document = {
        "fitted_on": f"{args.name or args.folder.resolve().name}, {len(labels)} images",
        "fitted_at": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "skills": {
            skill: {
                "temperature": round(fitted[skill].temperature, 4),
                "offset": round(fitted[skill].offset, 4),
            }
            for skill in kept
        },
    }
    _write(path, json.dumps(document, indent=2) + "\n")
    terminal.line(f"written {path}" + ("" if tested else f"; {_SAME_SET}"))


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _labels(folder: Path, args: argparse.Namespace) -> list[LabelledImage]:
    annotations = folder / ANNOTATIONS
    if folder is args.folder and args.annotations:
        annotations = args.annotations
    with reporting(UnusableLabels):
        return read_labels(folder, annotations, absent=args.absent)


@contextlib.contextmanager
def _client(args: argparse.Namespace, terminal: Terminal) -> Iterator[Client]:
    if args.weights is None:
        with arguments.connect(args) as client:
            yield client
        return
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
    args: argparse.Namespace, client: Client, labels: list[LabelledImage], terminal: Terminal
) -> list[Scored]:
    model = "" if args.weights else args.model
    with terminal.counting("images", len(labels), 0) as tell:
        try:
            return score(
                client, labels, args.skills, model=model, parallel=args.parallel, tell=tell
            )
        except NoTokenCertainties:
            raise CommandError(
                "the server reports no token certainties: it is older than this "
                "client, or its model has no confidences"
            ) from None
        except OSError as error:
            raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None


def _fit(skill: str, found: Sequence[Scored]) -> fits.Fit:
    pairs = [(each.score, each.right) for each in _of(skill, found)]
    if len(pairs) < _FEWEST:
        raise CommandError(
            f"{len(pairs)} objects were found by {skill}; a fit needs {_FEWEST}: label more "
            "images, or leave the skill out of --skills"
        )
    return fits.fit(pairs)


def _of(skill: str, found: Sequence[Scored]) -> list[Scored]:
    return [each for each in found if each.skill == skill]


def _report(
    fitted: dict[str, fits.Fit],
    judged: dict[str, Judgement],
    kept: Sequence[str],
    path: Path | None,
    terminal: Terminal,
) -> None:
    """Print the errors of `judged`, and which skills are written."""
    rows: list[dict[str, Any]] = [
        {
            "skill": skill,
            "objects": each.objects,
            "right": each.right,
            "temperature": fitted[skill].temperature,
            "offset": fitted[skill].offset,
            "ece_before": each.ece_before,
            "ece_before_error": each.ece_before_error,
            "ece_after": each.ece_after,
            "ece_after_error": each.ece_after_error,
            "gain_error": each.gain_error,
            "written": skill in kept,
        }
        for skill, each in judged.items()
    ]
    headers = ("skill", "objects", "right", "temperature", "offset", "ECE before", "after", "")
    terminal.table(headers, [_cells(row) for row in rows])
    terminal.document({"output": None if path is None else str(path), "skills": rows})


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        *(str(row[name]) for name in ("skill", "objects", "right")),
        *(f"{row[name]:.3f}" for name in ("temperature", "offset")),
        *(f"{row[name]:.4f} ± {row[f'{name}_error']:.4f}" for name in ("ece_before", "ece_after")),
        "written" if row["written"] else "not better, left out",
    ]
