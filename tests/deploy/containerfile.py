"""The stages of deploy/Containerfile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.deploy.manifests import DEPLOY

FILE = DEPLOY / "Containerfile"


class Step(NamedTuple):
    """An instruction and its arguments."""

    instruction: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """Of the exec form, which no shell reads."""
        words: list[str] = json.loads(self.arguments)
        return words


def stages() -> dict[str, list[Step]]:
    """The steps of each stage, without those of the stage that it begins with."""
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE)
    found: dict[str, list[Step]] = {}
    name = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        step = Step(*line.split(None, 1))
        if step.instruction == "FROM":
            name = step.arguments.rpartition(" AS ")[2]
        found.setdefault(name, []).append(step)
    return found


def image(target: str) -> list[Step]:
    """The steps of a target, with those of the stages that it begins with."""
    all_stages = stages()
    base = all_stages[target][0].arguments.partition(" AS ")[0]
    return [*(image(base) if base in all_stages else []), *all_stages[target]]


def last(target: str, instruction: str) -> Step:
    """What is in force in an image."""
    return [step for step in image(target) if step.instruction == instruction][-1]


def environment(target: str) -> dict[str, str]:
    steps = [step.arguments for step in image(target) if step.instruction == "ENV"]
    return dict(pair.split("=", 1) for step in steps for pair in step.split())


def copied() -> set[Path]:
    """What the build takes from the repository."""
    steps = [step for steps in stages().values() for step in steps if step.instruction == "COPY"]
    sources = [each.arguments.split()[:-1] for each in steps if "--from" not in each.arguments]
    return {Path(source) for step in sources for source in step}
