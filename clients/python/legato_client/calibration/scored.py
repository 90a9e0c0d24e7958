"""Scored objects of labelled images."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato_client._client import Client
from legato_client._errors import Busy, LegatoError
from legato_client._proto import skills
from legato_client._proto.responses import TaskOutcome
from legato_client._types.results import Box, Mark, Point, PointedObject, Result, Token, overlap
from legato_client._types.tasks import Options, Task

ANNOTATIONS = "annotations.json"


class UnusableLabels(ValueError):
    """The file of annotations cannot be read as such."""


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """An image with the boxes of each object, by name; absent objects have none."""

    path: Path
    number: int  # the image's id in the file of annotations
    boxes: dict[str, tuple[Box, ...]]


def read_labels(
    folder: Path, annotations: Path, *, absent: int, seed: int = 0
) -> list[LabelledImage]:
    """Return each image with the categories that it shows, and `absent` others.

    Crowds have no box of their own, so an image's category that has one is left out of it.

    Raises:
        UnusableLabels: the file is missing or has another form.
    """
    try:
        document = json.loads(annotations.read_bytes())
        return _labelled(document, folder, absent, random.Random(seed))
    except OSError as error:
        raise UnusableLabels(f"{annotations}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableLabels(f"{annotations} is no COCO file of boxes: {error!r}") from None


def _labelled(
    document: Any, folder: Path, absent: int, choice: random.Random
) -> list[LabelledImage]:
    names = {each["id"]: str(each["name"]) for each in document["categories"]}
    sizes = {each["id"]: (each["width"], each["height"]) for each in document["images"]}
    found: dict[int, dict[str, list[Box]]] = {number: {} for number in sizes}
    crowds: set[tuple[int, str]] = set()
    for each in document["annotations"]:
        number, name = each["image_id"], names[each["category_id"]]
        if each.get("iscrowd"):
            crowds.add((number, name))
        else:
            found[number].setdefault(name, []).append(_box(each["bbox"], *sizes[number]))
    images = []
    for image in document["images"]:
        number = image["id"]
        known = found[number].keys() | {name for of, name in crowds if of == number}
        others = sorted(set(names.values()) - known)
        boxes = {name: tuple(all_) for name, all_ in found[number].items()}
        boxes |= dict.fromkeys(choice.sample(others, min(absent, len(others))), ())
        boxes = {name: all_ for name, all_ in boxes.items() if (number, name) not in crowds}
        images.append(LabelledImage(folder / image["file_name"], number, boxes))
    return images


def _box(bbox: list[float], width: float, height: float) -> Box:
    left, top, across, down = bbox
    return Box(left / width, top / height, (left + across) / width, (top + down) / height)


# ---------------------------------------------------------------- objects

# Found objects as JSON lines.


def lines(name: str, found: Iterable[Scored]) -> Iterator[str]:
    """Write one image set's objects; `certainties` are existence and concentration per token."""
    for each in found:
        yield json.dumps(
            {
                "set": name,
                "skill": each.skill,
                "picture": each.image,
                "name": each.name,
                "place": dataclasses.astuple(each.place),
                "certainties": each.certainties,
                "score": each.score,
                "right": each.right,
                "shown": each.shown,
            }
        )


def read(path: Path, name: str) -> list[Scored]:
    with path.open(encoding="utf-8") as file:
        documents = (json.loads(line) for line in file)
        return [_scored(each) for each in documents if each["set"] == name]


def _scored(document: dict[str, Any]) -> Scored:
    place = document["place"]
    return Scored(
        skill=document["skill"],
        image=document["picture"],
        name=document["name"],
        place=Box(*place) if len(place) == 4 else Point(*place),
        certainties=tuple((exists, near) for exists, near in document["certainties"]),
        right=document["right"],
        shown=document.get("shown", True),
    )


# ---------------------------------------------------------------- scored

SKILLS = tuple(skill.name for skill in skills.SKILLS if skill.places)
MIN_IOU = 0.5
"""Minimum overlap of a right box."""

_MAX_TASKS = 32  # limit of RunTasks
_MAX_TRIES = 20  # per task that finds the queue full
_TOKENS = {"boxes": 3, "points": 2}  # tokens per object, or per outline's box

Certainties = tuple[tuple[float, float], ...]


class NoTokenCertainties(Exception):
    """Raised when the server found objects but reported no token certainties."""


@dataclass(frozen=True, slots=True)
class Scored:
    """An object that was found; `certainties` are existence and concentration of its tokens.

    `shown`: the image shows something of its name, so the question was not about nothing.
    """

    skill: str
    image: int
    name: str
    place: Box | Point
    certainties: Certainties
    right: bool
    shown: bool = True

    @property
    def score(self) -> float:
        """Return the confidence before any calibration."""
        return product(self.certainties)


def score(
    client: Client,
    images: Iterable[LabelledImage],
    words: Sequence[str],
    *,
    model: str = "",
    parallel: int,
    tell: Callable[[], None],
) -> list[Scored]:
    """Ask skills about each image's categories; `tell` is called after each image.

    Raises:
        LegatoError: the server refuses, or an image cannot be read by it.
        NoTokenCertainties: the server reports none.
        OSError: a file cannot be read.
    """
    options = Options(model=model, top_logprobs=0)

    def of(image: LabelledImage) -> list[Scored]:
        found = list(_of_image(client, image, words, options))
        tell()
        return found

    with futures.ThreadPoolExecutor(parallel, "legato-calibrate") as pool:
        return [each for found in pool.map(of, images) for each in found]


def _of_image(
    client: Client, image: LabelledImage, words: Sequence[str], options: Options
) -> Iterator[Scored]:
    asked = [
        (skills.BY_NAME[word], name)
        for word in words
        for name, boxes in image.boxes.items()
        # A single-object skill does not say which object it found.
        if skills.BY_NAME[word].takes("max_objects") or len(boxes) < 2
    ]
    data = image.path.read_bytes()
    for first in range(0, len(asked), _MAX_TASKS):
        some = asked[first : first + _MAX_TASKS]
        results = _results(client, data, [skill.task(name) for skill, name in some], options)
        for (skill, name), result in zip(some, results, strict=True):
            places = [_place(mark) for mark in result.marks]
            found_certainties = certainties(result.info.tokens, _TOKENS[skill.places])
            if len(found_certainties) < len(places):
                raise NoTokenCertainties
            rights = right_places(
                places, [product(each) for each in found_certainties], image.boxes[name]
            )
            for place, one, right in zip(places, found_certainties, rights, strict=False):
                shown = bool(image.boxes[name])
                yield Scored(skill.name, image.number, name, place, one, right, shown)


def _results(client: Client, image: bytes, tasks: Sequence[Task], options: Options) -> list[Result]:
    """Run all tasks; retry those that found a full queue when the server says."""
    results: dict[int, Result] = {}
    busy: Busy | None = None
    for _ in range(_MAX_TRIES):
        left = [index for index in range(len(tasks)) if index not in results]
        outcomes: Sequence[TaskOutcome]
        try:
            outcomes = client.run_tasks(image, [tasks[index] for index in left], options=options)
        except Busy as error:
            outcomes = [error] * len(left)
        wait, busy = 0.0, None
        for index, outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, Busy) and outcome.retry_after is not None:
                wait, busy = max(wait, outcome.retry_after), outcome
            elif isinstance(outcome, LegatoError):
                raise outcome
            else:
                results[index] = outcome
        if busy is None:
            return [results[index] for index in range(len(tasks))]
        time.sleep(wait)
    assert busy is not None, "it is why there was one more try"
    raise busy


def certainties(tokens: Iterable[Token], tokens_per_object: int) -> list[Certainties]:
    found_certainties = [
        (each.certainty.existence, each.certainty.concentration)
        for each in tokens
        if each.certainty is not None
    ]
    ends = range(tokens_per_object, len(found_certainties) + 1, tokens_per_object)
    return [tuple(found_certainties[end - tokens_per_object : end]) for end in ends]


def product(certainties: Certainties) -> float:
    return math.prod(exists * near for exists, near in certainties)


def right_places(
    places: Sequence[Box | Point], scores: Sequence[float], truth: Sequence[Box]
) -> list[bool]:
    """Match boxes greedily by falling score to the best unmatched true box."""
    free = list(truth)
    right = [False] * len(places)
    for index in sorted(range(len(places)), key=lambda index: -scores[index]):
        fits = [(fit, box) for box in free if (fit := _fit(places[index], box)) >= MIN_IOU]
        if fits:
            right[index] = True
            free.remove(max(fits, key=lambda each: each[0])[1])
    return right


def _place(mark: Mark) -> Box | Point:
    return mark.point if isinstance(mark, PointedObject) else mark.box


def _fit(place: Box | Point, box: Box) -> float:
    """Return the intersection over union; for a point, 1 inside of the box."""
    if isinstance(place, Point):
        inside = box.x_min <= place.x <= box.x_max and box.y_min <= place.y <= box.y_max
        return float(inside)
    return overlap(place, box)
