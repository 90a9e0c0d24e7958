"""Found objects in a file: a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from legato_client._values.results import Box, Point
from legato_client.calibration.scored import Scored


def lines(name: str, found: Iterable[Scored]) -> Iterator[str]:
    """Of one set of pictures; `certainties` are existence and concentration of each token."""
    for each in found:
        yield json.dumps(
            {
                "set": name,
                "skill": each.skill,
                "picture": each.picture,
                "name": each.name,
                "place": _numbers(each.place),
                "certainties": each.certainties,
                "score": each.score,
                "right": each.right,
            }
        )


def read(path: Path, name: str) -> list[Scored]:
    """The objects of one of the sets."""
    with path.open(encoding="utf-8") as file:
        documents = (json.loads(line) for line in file)
        return [_scored(each) for each in documents if each["set"] == name]


def _scored(document: dict[str, Any]) -> Scored:
    place = document["place"]
    return Scored(
        skill=document["skill"],
        picture=document["picture"],
        name=document["name"],
        place=Box(*place) if len(place) == 4 else Point(*place),
        certainties=tuple((exists, near) for exists, near in document["certainties"]),
        right=document["right"],
    )


def _numbers(place: Box | Point) -> tuple[float, ...]:
    if isinstance(place, Point):
        return (place.x, place.y)
    return (place.x_min, place.y_min, place.x_max, place.y_max)
