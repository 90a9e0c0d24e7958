"""`legato completion`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from legato_client.cli import forward
from legato_client.cli.settings import CommandError
from legato_client.cli.terminal import Terminal

SHELLS = ("bash", "zsh", "fish")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion of this command for a shell",
        description="Print a script that completes commands and options. bash: put "
        '`eval "$(legato completion bash)"` into ~/.bashrc; zsh: write it to a file _legato in a '
        "folder of $fpath; fish: write it to ~/.config/fish/completions/legato.fish.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Print the completion script; `args.whole` makes the parser of all commands."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ModuleNotFoundError:
        raise CommandError(f"completion needs shtab: {forward.hint('cli')}") from None
    sys.stdout.write(shtab.complete(args.whole(), args.shell))
    sys.stdout.write("\n")
