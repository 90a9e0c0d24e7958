"""Labelled pictures in COCO's form."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato_client._values.results import Box

ANNOTATIONS = "annotations.json"


class UnusableLabels(ValueError):
    """The file of annotations cannot be read as such."""


@dataclass(frozen=True, slots=True)
class LabelledPicture:
    """A picture with the boxes of each object, by name; absent objects have none."""

    path: Path
    number: int  # the image's id in the file of annotations
    boxes: dict[str, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class LabelledFolder:
    """Pictures, and the ids of the categories by name."""

    pictures: tuple[LabelledPicture, ...]
    categories: dict[str, int]


def read_labels(folder: Path, annotations: Path, *, absent: int, seed: int = 0) -> LabelledFolder:
    """Each picture with the categories that it shows, and `absent` others that it does not.

    Crowds have no box of their own, so a picture's category that has one is left out of it.

    Raises:
        UnusableLabels: the file is missing or has another form.
    """
    try:
        document = json.loads(annotations.read_bytes())
        return _folder(document, folder, absent, random.Random(seed))
    except OSError as error:
        raise UnusableLabels(f"{annotations}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableLabels(f"{annotations} is no COCO file of boxes: {error!r}") from None


def _folder(document: Any, folder: Path, absent: int, choice: random.Random) -> LabelledFolder:
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
    pictures = []
    for image in document["images"]:
        number = image["id"]
        known = found[number].keys() | {name for of, name in crowds if of == number}
        others = sorted(set(names.values()) - known)
        boxes = {name: tuple(all_) for name, all_ in found[number].items()}
        boxes |= dict.fromkeys(choice.sample(others, min(absent, len(others))), ())
        boxes = {name: all_ for name, all_ in boxes.items() if (number, name) not in crowds}
        pictures.append(LabelledPicture(folder / image["file_name"], number, boxes))
    return LabelledFolder(tuple(pictures), {name: number for number, name in names.items()})


def _box(bbox: list[float], width: float, height: float) -> Box:
    left, top, across, down = bbox
    return Box(left / width, top / height, (left + across) / width, (top + down) / height)
