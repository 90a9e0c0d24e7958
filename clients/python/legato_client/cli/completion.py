"""`legato completion`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from legato_client.cli import arguments, forward
from legato_client.cli.terminal import Terminal

SHELLS = ("bash", "zsh", "fish")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion of this command for a shell",
        description="Print a script that completes commands and options.\n"
        '  bash  put `eval "$(legato completion bash)"` into ~/.bashrc\n'
        "  zsh   write it to a file _legato in a folder of $fpath\n"
        "  fish  write it to ~/.config/fish/completions/legato.fish",
        example='eval "$(legato completion bash)"',
    )
    parser.add_argument("shell", choices=SHELLS, help="shell to complete in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Print the completion script; `args.whole` makes the parser of all commands."""
    forward.require("completion", "cli", "shtab")
    shtab: Any = importlib.import_module("shtab")
    parser = args.whole()
    for leaf in args.leaves(parser):
        for action in leaf._actions:
            action.option_strings = arguments.visible_names(action)
    sys.stdout.write(shtab.complete(parser, args.shell))
    sys.stdout.write("\n")
