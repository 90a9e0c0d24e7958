"""`legato pull`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from legato_engine.hub import download, store
from legato_engine.hub.catalog import MODELS
from legato_engine.hub.options import pull_parser

FAILED, NOT_FOUND, UNREACHABLE, INTERRUPTED = 1, 3, 4, 130
"""Exit codes, as those of the command `legato`."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = pull_parser().parse_args(argv)
    model = MODELS[arguments.model]
    folder = store.folder_of(arguments.models, model.name)
    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    out.print(f"licence: {model.licence}", markup=False, highlight=False)
    try:
        manifest = download.pull(
            model, folder, lambda line: out.print(line, markup=False, highlight=False)
        )
    except download.PullFailed as error:
        err.print(f"legato: error: {error}", markup=False, highlight=False)
        return _exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    out.print(
        f"{model.name}: {manifest.num_bytes / 1e9:.2f} GB in {folder}, sizes and hashes checked; "
        f"legato serve --model {model.name}",
        markup=False,
        highlight=False,
    )
    return 0


def _exit_code(error: download.PullFailed) -> int:
    match error:
        case download.NotPublished():
            return NOT_FOUND
        case download.HubUnreachable():
            return UNREACHABLE
        case _:
            return FAILED


if __name__ == "__main__":
    sys.exit(main())
