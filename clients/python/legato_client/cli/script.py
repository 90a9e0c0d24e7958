"""What the demo asks about its image."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from legato_client import CaptionLength, CaptionTask, Sampling, Task
from legato_client._convert import skills
from legato_client.cli import install
from legato_client.cli.exits import CommandError, ExitCode

ASKED = tuple(skill for skill in skills.SKILLS if skill is not skills.CAPTION)
"""The skills that are asked about a subject."""


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """An image and the questions about it; empty text leaves a part out."""

    image: Path
    caption_length: CaptionLength | Literal[""] = "normal"
    subjects: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Of the other skills, what each is asked about."""

    def with_changes(self, **given: list[str] | str | None) -> Script:
        """None keeps what a skill is asked."""
        changes = {name: _subjects(each) for name, each in given.items() if each is not None}
        return dataclasses.replace(self, subjects={**self.subjects, **changes})

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
        for skill in ASKED:
            for subject in self.subjects.get(skill.name, ()):
                yield f"{skill.name} {subject}", skill.make(subject, Sampling())


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
            subjects={skill.name: _subjects(said.get(skill.name, ())) for skill in ASKED},
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise CommandError(f"{beside} is not a demo script: {error}") from error


def _subjects(given: Iterable[str] | str) -> tuple[str, ...]:
    """One or several; an empty one asks nothing."""
    return tuple(filter(None, (given,) if isinstance(given, str) else given))


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
