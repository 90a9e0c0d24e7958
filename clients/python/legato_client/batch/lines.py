"""Answers as lines of JSON, and marks read back from them."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legato_client._errors import LegatoError
from legato_client._values.results import (
    Box,
    Detection,
    Mark,
    Outline,
    Point,
    PointedObject,
    Result,
)
from legato_client.batch.sources import Key, Picture

Line = dict[str, Any]

UNREADABLE = "UNREADABLE"
"""The code of a file that could not be read, where the others are gRPC's."""


_NOT_TEXT = re.compile("[\ud800-\udfff]")  # how Python writes bytes of names that are not UTF-8


def encode(line: Mapping[str, Any]) -> bytes:
    """Encode one line. Strings of JSON are Unicode: what of one is not becomes U+FFFD."""
    return _unicode(json.dumps(line, ensure_ascii=False)).encode() + b"\n"


def file_name(field: str, name: str) -> dict[str, str]:
    """Return the fields of a file's name: a second one, `_base64`, has the bytes if not UTF-8."""
    shown = _unicode(name)
    if shown == name:
        return {field: name}
    return {field: shown, f"{field}_base64": base64.b64encode(os.fsencode(name)).decode()}


def key_of(line: Mapping[str, Any]) -> Key:
    """Return the key of a line. Raises KeyError or ValueError for a line of something else."""
    encoded = line.get("source_base64")
    source = line["source"] if encoded is None else os.fsdecode(base64.b64decode(encoded))
    return Key(source, line.get("frame"))


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
        yield from map(_mark, places(result))


def places(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects, points or outlines of a task's result."""
    for value in result.values():
        if isinstance(value, list | tuple):
            yield from value


def texts(line: Mapping[str, Any]) -> Iterator[str]:
    """Answers and captions."""
    for result in line.get("results", {}).values():
        yield from (result[name] for name in ("answer", "caption") if name in result)


def _begun(picture: Picture) -> Line:
    line: Line = file_name("source", picture.key.source)
    if picture.key.frame is not None:
        line |= {"frame": picture.key.frame, "time": picture.time}
    return line


def _unicode(text: str) -> str:
    return _NOT_TEXT.sub("\ufffd", text)


def _result(result: Result) -> dict[str, Any]:
    """The fields of the result, places also in pixels, and how it came about."""
    fields = dataclasses.asdict(result)
    del fields["info"], fields["task_id"]
    image = result.info.image
    if image is not None:
        size = image.width, image.height
        for found, mark in zip(places(fields), result.marks, strict=True):
            found.update(_pixels(mark, *size))
    info = result.info
    about = {"finish_reason": info.finish_reason, "model": info.model}
    return {**fields, **about, "request_id": info.request_id}


def _mark(found: Mapping[str, Any]) -> Mark:
    label, confidence = found["label"], found["confidence"]
    if "point" in found:
        return PointedObject(Point(**found["point"]), label, confidence)
    if "path" in found:
        return Outline(found["path"], Box(**found["box"]), label, confidence)
    return Detection(Box(**found["box"]), label, confidence)


def _pixels(mark: Mark, width: int, height: int) -> dict[str, Any]:
    match mark:
        case Detection():
            return {"box_pixels": mark.to_pixels(width, height)}
        case PointedObject():
            return {"point_pixels": mark.to_pixels(width, height)}
        case Outline():
            box = mark.box.to_pixels(width, height)
            return {"box_pixels": box, "polygons_pixels": _polygons(mark, width, height)}


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
