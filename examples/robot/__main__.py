"""`python -m examples.robot`: play, score, write the report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legato_client import AsyncClient, LegatoError
from legato_client.cli.demo import LocalServer
from legato_client.cli.settings import CommandError

from examples.robot import report
from examples.robot.drive import Clip, play
from examples.robot.recording import Recording
from examples.robot.scene import NOUNS, Scene, compose

_START_TIMEOUT = 300.0  # seconds for a server to load its model


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if the session's books do not agree or nothing could be measured."""
    args = _parser().parse_args(argv)
    scene = compose(tuple(args.nouns), args.seed, tuple(args.size))
    print(f"drawing {round(args.seconds * args.fps)} images", file=sys.stderr)
    files = [scene.jpeg(k / args.fps) for k in range(round(args.seconds * args.fps))]
    try:
        with _server(args) as target:
            print(f"playing {args.seconds:g} s at {args.fps:g} fps to {target}", file=sys.stderr)
            recording = asyncio.run(_play(target, Clip(files, args.fps), args))
    except (LegatoError, CommandError) as error:
        print(f"nothing measured: {error}", file=sys.stderr)
        return 1
    figures = report.summarise(scene, recording)
    _write(args, scene, recording, figures)
    return 1 if figures["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.robot",
        description="Play a clip of moving things through a session in real time and score the "
        "answers against the truth. Options of `legato serve` may follow after `--`.",
        epilog=f"There are drawings of: {', '.join(NOUNS)}.",
    )
    parser.add_argument("--target", metavar="HOST:PORT", help="default: a server of its own")
    parser.add_argument("--nouns", nargs="+", default=["balloon", "bicycle", "dog"], choices=NOUNS)
    parser.add_argument("--seconds", type=float, default=10.0, help="default %(default)g")
    parser.add_argument("--fps", type=float, default=30.0, help="default %(default)g")
    parser.add_argument("--size", type=int, nargs=2, default=[640, 480], metavar="PIXELS")
    parser.add_argument("--seed", type=int, default=0, help="another scene; default %(default)d")
    parser.add_argument(
        "--max-frame-age", type=float, default=2.0, metavar="SECONDS", help="default %(default)g"
    )
    parser.add_argument(
        "--in-flight", type=int, default=0, metavar="FRAMES", help="default: the server's choice"
    )
    parser.add_argument(
        "--max-objects", type=int, metavar="COUNT", help="boxes of a noun; default: the model's"
    )
    parser.add_argument("--out", type=Path, default=Path("build/robot"), help="default %(default)s")
    parser.add_argument("--film", choices=("gif", "mp4"), help="write the whole clip, overlaid")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION")
    return parser


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the given server, or of one that runs meanwhile."""
    if args.target:
        yield args.target
        return
    with LocalServer(args.serve_options) as server:
        server.wait_until_serving(_START_TIMEOUT, lambda text: None)
        yield server.target


async def _play(target: str, clip: Clip, args: argparse.Namespace) -> Recording:
    async with AsyncClient(target) as client:
        return await play(
            client,
            clip,
            tuple(args.nouns),
            args.max_frame_age,
            max_in_flight=args.in_flight,
            max_objects=args.max_objects,
        )


def _write(
    args: argparse.Namespace, scene: Scene, recording: Recording, figures: dict[str, Any]
) -> None:
    """robot.json, robot.md, robot.png and the film into the folder that was asked for."""
    args.out.mkdir(parents=True, exist_ok=True)
    setting = _setting(args)
    record = json.dumps(report.without_nan({"setting": setting, "figures": figures}), indent=1)
    (args.out / "robot.json").write_text(record + "\n")
    text = report.markdown("A robot's camera through a session", setting, figures)
    (args.out / "robot.md").write_text(text)
    if recording.answers:
        report.sheet(scene, recording).save(args.out / "robot.png", optimize=True)
    if args.film:
        images = report.film(scene, recording)
        report.write_film(args.out / f"robot.{args.film}", images, args.fps)
    print(text)


def _setting(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "server": args.target or " ".join(["legato serve", *args.serve_options]),
        "nouns": ", ".join(args.nouns),
        "pictures": f"{args.size[0]}x{args.size[1]} JPEG, {args.seconds:g} s at {args.fps:g} fps",
        "seed": args.seed,
        "max_frame_age_s": args.max_frame_age,
        "in_flight": args.in_flight or "the server's choice",
        "max_objects": args.max_objects or "the model's choice",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": f"{os.getloadavg()[0]:.1f} over the last minute, the server's own included",
    }


if __name__ == "__main__":
    sys.exit(main())
