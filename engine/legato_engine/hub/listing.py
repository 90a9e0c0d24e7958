"""`legato models`: list models and where they fit."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato_engine.device.host import NoGpuError, available_memory, gpus
from legato_engine.hub import store
from legato_engine.hub.store import MODELS, Published, models_parser

_SLACK = 1.2
"""Memory that a model needs / memory of its weights; KV cache and images come on top."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Memory that weights can be loaded into, in bytes."""

    name: str
    num_bytes: int

    def fit(self, model: Published) -> str:
        """Return the place's name if the model fits, with the form if only a smaller one does."""
        if self.name == "cpu":
            return self.name if self._holds(2 * model.bf16_bytes) else ""  # as float32
        if self._holds(model.fp8_bytes if model.stored_fp8 else model.bf16_bytes):
            return self.name
        forms = (name for name, size in model.rounded_bytes if self._holds(size))
        form = next(forms, "")
        return form and f"{self.name} as {form}"

    def _holds(self, num_bytes: int) -> bool:
        return num_bytes * _SLACK <= self.num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    arguments = models_parser().parse_args(argv)
    if arguments.memory is not None:
        places = [Place("gpu", round(arguments.memory * 1e9))]
    else:
        places = [Place("cpu", available_memory()), *gpu_places()]
    rows = [_row(each, arguments.models, places) for each in MODELS.values()]
    console = Console(soft_wrap=not sys.stdout.isatty())
    if arguments.json:
        memory = {each.name: each.num_bytes for each in places}
        print(json.dumps({"memory": memory, "models": rows}))  # noqa: T201
        return 0
    table = Table("model", "here", "bf16", "fp8", "fits", "licence", box=None)
    table.add_column("from", overflow="fold")  # whole, to be copied
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    console.print(table)
    room = ", ".join(f"{each.name} {_gb(each.num_bytes)}" for each in places)
    console.print(f"memory: {room}; a model fits if it takes {_SLACK} times its weights")
    return 0


def gpu_places() -> list[Place]:
    """List the GPUs that the driver reports; empty without a driver.

    A GPU that shares the host's memory has what is free of it.
    """
    try:
        found = gpus()
    except NoGpuError:
        return []
    free = available_memory()
    return [
        Place(each.device, min(each.num_bytes, free) if each.is_integrated else each.num_bytes)
        for each in found
    ]


def _row(model: Published, models: str, places: Sequence[Place]) -> dict[str, object]:
    folder = store.model_folder(models, model.name)
    manifest = store.read_manifest(folder)
    return {
        "model": model.name,
        "folder": str(folder) if manifest else "",
        "pulled": manifest.pulled if manifest else "",
        "bytes_here": manifest.num_bytes if manifest else 0,
        "bf16_bytes": model.bf16_bytes,
        "fp8_bytes": model.fp8_bytes,
        "rounded_bytes": dict(model.rounded_bytes),
        "fits": [fit for each in places if (fit := each.fit(model))],
        "licence": model.licence,
        "from": manifest.origins
        if manifest
        else [f"{each.repository}@{each.revision}" for each in model.sources],
    }


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    fits, origins = row["fits"], row["from"]
    assert isinstance(fits, list)
    assert isinstance(origins, list | tuple)
    return (
        str(row["model"]),
        _gb(row["bytes_here"]) if row["pulled"] else "no",
        _gb(row["bf16_bytes"]),
        _gb(row["fp8_bytes"]) if row["fp8_bytes"] else "-",
        ", ".join(fits) or "nowhere",
        str(row["licence"]).partition(":")[0],
        "\n".join(origins),
    )


def _gb(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    return f"{num_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
