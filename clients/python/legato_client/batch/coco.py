"""Boxes and outlines as a file of COCO's form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from legato_client._values.tasks import Task
from legato_client.batch.lines import Line, file_name, key_of, places
from legato_client.batch.output import replacing
from legato_client.batch.tasks import object_of


def write(path: Path, lines: Iterable[Line], tasks: Mapping[str, Task]) -> int:
    """Write the file and return the number of annotations. Pictures that failed are not in it.

    A frame of a video has its file's name, its number as `frame` and its time in seconds as `time`.
    Raises OSError.
    """
    document = _document(lines, tasks)
    with replacing(path) as part:
        part.write_text(json.dumps(document), encoding="utf-8")
    return len(document["annotations"])


def _document(lines: Iterable[Line], tasks: Mapping[str, Task]) -> dict[str, list[Any]]:
    """The names of COCO; ids count from 1, and objects of one name are one category."""
    named = {name: noun for name, task in tasks.items() if (noun := object_of(task))}
    categories = {noun: number for number, noun in enumerate(dict.fromkeys(named.values()), 1)}
    images: list[Any] = []
    annotations: list[Any] = []
    for line in lines:
        if "width" not in line:
            continue
        size = {"width": line["width"], "height": line["height"]}
        moment = {name: line[name] for name in ("frame", "time") if name in line}
        source = file_name("file_name", key_of(line).source)
        images.append({"id": len(images) + 1, **source, **size, **moment})
        for name, noun in named.items():
            result = line["results"][name]
            for found in places(result):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": len(images),
                        "category_id": categories[noun],
                        **_place(found, **size),
                    }
                )
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": noun} for noun, number in categories.items()],
    }


def _place(found: Mapping[str, Any], width: int, height: int) -> dict[str, Any]:
    """In pixels with fractions. The area is the box's, also of an outline, whose rings may nest."""
    box = found["box"]
    left, top = box["x_min"] * width, box["y_min"] * height
    across, down = box["x_max"] * width - left, box["y_max"] * height - top
    place: dict[str, Any] = {
        "bbox": [round(value, 2) for value in (left, top, across, down)],
        "area": round(across * down, 2),
        "iscrowd": 0,
        # COCO wants rings of at least three corners.
        "segmentation": [ring for ring in found.get("polygons_pixels", ()) if len(ring) >= 6],
    }
    if found["confidence"] is not None:
        place["score"] = found["confidence"]
    return place
