"""The list of cases, as the Python programs read it."""

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
    """Return all cases in order, with the name of a run filled in."""
    cases: list[Case] = json.loads(path.read_text().replace("$RUN", run))
    return cases


def fill(template: Json, images: Path, done: list[Step]) -> Json:
    """Fill images and earlier responses into a message template."""
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
    if "$checkpoint" in template:
        return checkpoint_of(done[template["$checkpoint"]]["messages"])
    return {name: fill(value, images, done) for name, value in template.items()}


def checkpoint_of(messages: list[Json]) -> Json:
    """Return the sum of a stream's checkpoints, as protobuf merges them."""
    whole: dict[str, Json] = {}
    for message in messages:
        for name, value in message.get("checkpoint", {}).items():
            whole[name] = whole.get(name, []) + value if isinstance(value, list) else value
    return whole
