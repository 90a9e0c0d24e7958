"""`python -m release build | prepare X.Y.Z | publish [--dry-run]`."""

from __future__ import annotations

import argparse
import datetime
import sys

from release import publish, versions
from release.build import ROOT, ReleaseError, build

DIST = ROOT / "dist"


def main() -> int:
    """Run one command; 1 with a sentence on stderr if something must be put right."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="fill dist with wheels and sdists, built twice")
    prepare = commands.add_parser("prepare", help="write the files of a release, to be committed")
    prepare.add_argument("version", metavar="X.Y.Z")
    steps = commands.add_parser("publish", help="build, check, upload and tag the tree's version")
    steps.add_argument("--dry-run", action="store_true", help="all but the upload; tags in a clone")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    if arguments.command == "build":
        build(ROOT, DIST, versions.version(ROOT))
        print((DIST / "SHA256SUMS").read_text(), end="")
    elif arguments.command == "prepare":
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        publish.prepare(ROOT, arguments.version, today)
    else:
        publish.Publication(ROOT, DIST, is_rehearsal=arguments.dry_run).run()


if __name__ == "__main__":
    sys.exit(main())
