"""What the demo asks about its image."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from legato_client import (
    CaptionLength,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
    Task,
)
from legato_client.cli import install
from legato_client.cli.exits import CommandError, ExitCode


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """An image and the questions about it; empty text leaves a part out."""

    image: Path
    caption_length: CaptionLength | Literal[""] = "normal"
    detect: tuple[str, ...] = ()
    point: str = ""
    segment: str = ""
    query: str = ""

    def with_changes(
        self,
        *,
        detect: list[str] | None,
        point: str | None,
        segment: str | None,
        query: str | None,
    ) -> Script:
        """None keeps a part."""
        return dataclasses.replace(
            self,
            detect=self.detect if detect is None else tuple(detect),
            point=self.point if point is None else point,
            segment=self.segment if segment is None else segment,
            query=self.query if query is None else query,
        )

    def read_image(self) -> bytes:
        try:
            return self.image.read_bytes()
        except OSError as error:
            message = f"cannot read {self.image}: {error.strerror}"
            raise CommandError(message, ExitCode.USAGE) from error

    def tasks(self) -> Iterator[tuple[str, Task]]:
        """Each with its title."""
        if self.caption_length:
            yield "caption", CaptionTask(self.caption_length)
        for noun in self.detect:
            yield f"detect {noun}", DetectTask(noun)
        if self.point:
            yield f"point {self.point}", PointTask(self.point)
        if self.segment:
            yield f"segment {self.segment}", SegmentTask(self.segment)
        if self.query:
            yield f"query {self.query}", QueryTask(self.query)


def script_for(image: Path) -> Script:
    """What a `.json` file beside the image says, else a caption."""
    beside = image.with_suffix(".json")
    if not beside.is_file():
        return Script(image)
    try:
        said = json.loads(beside.read_text(encoding="utf-8"))
        return Script(
            image,
            caption_length=said.get("caption_length", ""),
            detect=tuple(said.get("detect", ())),
            point=said.get("point", ""),
            segment=said.get("segment", ""),
            query=said.get("query", ""),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise CommandError(f"{beside} is not a demo script: {error}") from error


def sample_script() -> Script:
    """The script of the image that comes with the tiny model."""
    try:
        samples = Path(importlib.import_module("legato_tiny").path()) / "samples"
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the sample image comes with legato-tiny: {install.hint('engine')}, "
            "or name an image with --image"
        ) from error
    return script_for(samples / "scene.jpg")
