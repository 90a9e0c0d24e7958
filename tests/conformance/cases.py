"""The list, read; what the programs in Python share."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("cases.json")

Json = Any  # a JSON document
Step = dict[str, Json]
Case = dict[str, Json]


def load(path: Path = CASES, run: str = "$RUN") -> list[Case]:
    """All cases, in order, with the name of a run put in."""
    cases: list[Case] = json.loads(path.read_text().replace("$RUN", run))
    return cases


def fill(template: Json, images: Path, done: list[Step]) -> Json:
    """A message to send: the template with pictures and earlier answers put in."""
    if isinstance(template, list):
        return [fill(each, images, done) for each in template]
    if not isinstance(template, dict):
        return template
    if "$file" in template:
        return base64.b64encode((images / template["$file"]).read_bytes()).decode()
    if "$step" in template:
        found = done[template["$step"]]["messages"][-1]
        for name in template["at"].split("."):
            found = found[name]
        return found
    return {name: fill(value, images, done) for name, value in template.items()}
