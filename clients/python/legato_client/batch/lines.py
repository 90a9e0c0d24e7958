"""Answers as lines of JSON, and marks read back from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legato_client._errors import LegatoError
from legato_client._values.results import (
    Box,
    Detection,
    DetectResult,
    Outline,
    Point,
    PointedObject,
    PointResult,
    Result,
    SegmentResult,
)
from legato_client.batch.sources import Key, Picture

Line = dict[str, Any]
Mark = Detection | PointedObject | Outline

UNREADABLE = "UNREADABLE"
"""The code of a file that could not be read, where the others are gRPC's."""


def encode(line: Mapping[str, Any]) -> bytes:
    """One line; a file name that is no text is escaped."""
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def key_of(line: Mapping[str, Any]) -> Key:
    """Raises KeyError for a line of something else."""
    return Key(line["source"], line.get("frame"))


def has_failed(line: Mapping[str, Any]) -> bool:
    """Whether the picture, or one of its tasks, has an error."""
    results = line.get("results", {})
    return "error" in line or any("error" in result for result in results.values())


def answered(
    picture: Picture, names: Sequence[str], outcomes: Sequence[Result | LegatoError]
) -> Line:
    """The line of a picture, of which single tasks may have failed."""
    line = _begun(picture)
    image = next((each.info.image for each in outcomes if not isinstance(each, LegatoError)), None)
    if image is not None:
        line |= {"width": image.width, "height": image.height}
    line["results"] = {
        name: {"error": _error(outcome)} if isinstance(outcome, LegatoError) else _result(outcome)
        for name, outcome in zip(names, outcomes, strict=True)
    }
    return line


def failed(picture: Picture, error: LegatoError) -> Line:
    return {**_begun(picture), "error": _error(error)}


def unreadable(picture: Picture, error: OSError | ValueError) -> Line:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    message = f"cannot read {picture.key.source}: {reason}"
    return {**_begun(picture), "error": {"code": UNREADABLE, "reason": "", "message": message}}


def marks(line: Mapping[str, Any]) -> Iterator[Mark]:
    """What of the results has a place in the picture."""
    for result in line.get("results", {}).values():
        for found in result.get("objects", ()):
            yield Detection(Box(**found["box"]), found["label"], found["confidence"])
        for found in result.get("points", ()):
            yield PointedObject(Point(**found["point"]), found["label"], found["confidence"])
        for found in result.get("segments", ()):
            yield Outline(found["path"], Box(**found["box"]), found["label"], found["confidence"])


def texts(line: Mapping[str, Any]) -> Iterator[str]:
    """Answers and captions."""
    for result in line.get("results", {}).values():
        yield from (result[name] for name in ("answer", "caption") if name in result)


def _begun(picture: Picture) -> Line:
    line: Line = {"source": picture.key.source}
    if picture.key.frame is not None:
        line |= {"frame": picture.key.frame, "time": picture.time}
    return line


def _result(result: Result) -> dict[str, Any]:
    """The fields of the result, places also in pixels, and how it came about."""
    fields = dataclasses.asdict(result)
    del fields["info"], fields["task_id"]
    image = result.info.image
    if image is not None:
        size = image.width, image.height
        match result:
            case DetectResult(objects):
                for found, box in zip(fields["objects"], objects, strict=True):
                    found["box_pixels"] = box.to_pixels(*size)
            case PointResult(points):
                for found, point in zip(fields["points"], points, strict=True):
                    found["point_pixels"] = point.to_pixels(*size)
            case SegmentResult(segments):
                for found, outline in zip(fields["segments"], segments, strict=True):
                    found["box_pixels"] = outline.box.to_pixels(*size)
                    found["polygons_pixels"] = _polygons(outline, *size)
            case _:
                pass
    info = result.info
    about = {"finish_reason": info.finish_reason, "model": info.model}
    return {**fields, **about, "request_id": info.request_id}


def _polygons(outline: Outline, width: int, height: int) -> list[list[float]]:
    """Rings as COCO has them: x, y, x, y, ...; none where the path cannot be read."""
    try:
        rings = outline.polygons()
    except ValueError:
        return []
    return [
        [round(value, 1) for p in ring for value in (p.x * width, p.y * height)] for ring in rings
    ]


def _error(error: LegatoError) -> dict[str, Any]:
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "request_id": error.request_id,
    }
