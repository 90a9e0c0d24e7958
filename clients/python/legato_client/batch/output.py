"""Output files of a run: JSON lines and COCO."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato_client._errors import LegatoError
from legato_client._types.results import (
    Box,
    Detection,
    Mark,
    Outline,
    Point,
    PointedObject,
    Result,
    rings_of,
)
from legato_client._types.tasks import Task
from legato_client.batch.images import BatchImage, Key, RunError
from legato_client.batch.tasks import object_of

Line = dict[str, Any]

UNREADABLE = "UNREADABLE"
"""Error code of an unreadable file; the other codes are gRPC's."""


_NOT_TEXT = re.compile(
    "[\ud800-\udfff]"
)  # surrogates: Python's escapes of non-UTF-8 bytes in names


def encode(line: Mapping[str, Any]) -> bytes:
    """Encode one line. JSON strings are Unicode: anything else becomes U+FFFD."""
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
    """Return whether the image or one of its tasks has an error."""
    results = line.get("results", {})
    return "error" in line or any("error" in result for result in results.values())


def answered_line(
    image: BatchImage, names: Sequence[str], outcomes: Sequence[Result | LegatoError]
) -> Line:
    line = _new_line(image)
    info = next((each.info.image for each in outcomes if not isinstance(each, LegatoError)), None)
    if info is not None:
        line |= {"width": info.width, "height": info.height}
    line["results"] = {
        name: {"error": _error(outcome)} if isinstance(outcome, LegatoError) else _result(outcome)
        for name, outcome in zip(names, outcomes, strict=True)
    }
    return line


def failed_line(image: BatchImage, error: LegatoError) -> Line:
    return {**_new_line(image), "error": _error(error)}


def unreadable_line(image: BatchImage, error: OSError | ValueError) -> Line:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    message = f"cannot read {image.key.source}: {reason}"
    return {**_new_line(image), "error": {"code": UNREADABLE, "reason": "", "message": message}}


def marks(line: Mapping[str, Any]) -> Iterator[Mark]:
    for result in line.get("results", {}).values():
        yield from map(_mark, places(result))


def places(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects, points or outlines of a task's result."""
    for value in result.values():
        if isinstance(value, list | tuple):
            yield from value


def texts(line: Mapping[str, Any]) -> Iterator[str]:
    for result in line.get("results", {}).values():
        yield from (result[name] for name in ("answer", "caption") if name in result)


def _new_line(image: BatchImage) -> Line:
    line: Line = file_name("source", image.key.source)
    if image.key.frame is not None:
        line |= {"frame": image.key.frame, "time": image.time}
    return line


def _unicode(text: str) -> str:
    return _NOT_TEXT.sub("\ufffd", text)


def _result(result: Result) -> dict[str, Any]:
    """Return the result's fields, with places also in pixels, and its finish reason and model."""
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
    """Return rings in COCO's layout: x, y, x, y, ...; none if the path cannot be read."""
    return [
        [round(value, 1) for p in ring for value in (p.x * width, p.y * height)]
        for ring in rings_of(outline)
    ]


def _error(error: LegatoError) -> dict[str, Any]:
    return {name: getattr(error, name) for name in ("code", "reason", "message", "request_id")}


# ---------------------------------------------------------------- coco


def write(path: Path, lines: Iterable[Line], tasks: Mapping[str, Task]) -> int:
    """Write the file and return the number of annotations. Images that failed are not in it.

    A frame of a video has its file's name, its number as `frame` and its time in seconds as `time`.
    Raises OSError.
    """
    document = _document(lines, tasks)
    with replacing(path) as part:
        part.write_text(json.dumps(document), encoding="utf-8")
    return len(document["annotations"])


def _document(lines: Iterable[Line], tasks: Mapping[str, Task]) -> dict[str, list[Any]]:
    """Build the COCO document; ids count from 1, and objects of one name are one category."""
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
    """Return the place in fractional pixels; the area is the box's, since rings may nest."""
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


# ---------------------------------------------------------------- output

# A run's file has a header line with the settings, then a line for each image. Lines are written
# whole, by one thread at a time; a partial last line, left by a killed run, is cut off.

_VERSION = 1
_BEGINNING = b'{"legato_run": '


class Output:
    """Output file, locked by one run at a time; thread-safe.

    `done` are the images that have a line, `num_failed` is how many of those have an error.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the file; a run with the same `settings`, which are JSON values, continues it.

        Raises:
            RunError: the file is of another run, in use, or not a run's.
            OSError: it cannot be read or written.
        """
        self._path = path
        self._lock = threading.Lock()
        self._broken = False
        self.done: set[Key] = set()
        self.num_failed = 0
        self._file = _open_locked(path)
        try:
            self._read(json.loads(json.dumps(settings)))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, line: Line) -> None:
        """Append a line.

        Raises OSError; the file then has no part of the line, and takes no other.
        """
        data = encode(line)
        with self._lock:
            if self._broken:
                raise OSError("an earlier line could not be written")
            self._append(data)
            self._count(line)

    def lines(self) -> Iterator[Line]:
        """Yield each image's line, in the order of completion."""
        return (json.loads(data) for _, data in self._pieces())

    def places(self) -> Iterator[tuple[Key, int]]:
        """Yield each image with the offset of its line, for `line_at`."""
        return ((key_of(json.loads(data)), place) for place, data in self._pieces())

    def line_at(self, place: int) -> Line:
        with open(self._path, "rb") as file:
            file.seek(place)
            line: Line = json.loads(file.readline())
        return line

    def sort(self) -> None:
        order = sorted(self.places(), key=lambda each: (each[0].source, each[0].frame or 0))
        self._rewrite(encode(self.line_at(place)) for _, place in order)

    def drop_failed(self) -> None:
        if not self.num_failed:
            return
        self._rewrite(encode(line) for line in self.lines() if not has_failed(line))
        self.done = {key for key, _ in self.places()}
        self.num_failed = 0

    def _read(self, settings: Mapping[str, Any]) -> None:
        header = {"legato_run": _VERSION, **settings}
        with open(self._path, "rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                self._begin(first, header)
                return
            _check_header(self._path, first, header)
            end = len(first)
            for number, data in enumerate(file, start=2):
                if not data.endswith(b"\n"):
                    os.ftruncate(self._file, end)
                    break
                self._take(number, data)
                end += len(data)

    def _begin(self, torn: bytes, header: Mapping[str, Any]) -> None:
        """Write the header; `torn` is a partial first line that a killed run may have left."""
        if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise RunError(f"{self._path} is no file of a run: name another one")
        os.ftruncate(self._file, 0)
        self._append(encode(header))

    def _take(self, number: int, data: bytes) -> None:
        try:
            self._count(json.loads(data))
        except (ValueError, KeyError, TypeError):
            raise RunError(f"line {number} of {self._path} is not of a run") from None

    def _count(self, line: Line) -> None:
        self.done.add(key_of(line))
        self.num_failed += has_failed(line)

    def _append(self, data: bytes) -> None:
        end = os.fstat(self._file).st_size
        try:
            _write(self._file, data)
        except OSError:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            place = len(file.readline())
            for data in file:
                yield place, data
                place += len(data)

    def _rewrite(self, lines: Iterator[bytes]) -> None:
        """Replace the file atomically; the new one is locked before it takes its place."""
        with open(self._path, "rb") as old:
            header = old.readline()
        part = _part_of(self._path)
        file = os.open(part, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, header)
            for data in lines:
                _write(file, data)
            os.replace(part, self._path)
        except BaseException:
            os.close(file)
            part.unlink()
            raise
        os.close(self._file)
        self._file = file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to, which becomes `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    """Return the temporary name; its suffix stays, as it may select a format."""
    return path.with_name(f".part-{path.name}")


def _open_locked(path: Path) -> int:
    """Open the file for appending under a lock; reopen it if it was replaced meanwhile."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a file that a later run could continue")
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise RunError(f"another run is writing {path}") from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _write(file: int, data: bytes) -> None:
    """Write all data; a full disk may take a part of it before the error."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _check_header(path: Path, first: bytes, header: Mapping[str, Any]) -> None:
    try:
        found = json.loads(first)
        version = found["legato_run"]
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} is no file of a run: name another one") from None
    if version != _VERSION:
        raise RunError(f"{path} is of another version of legato run ({version})")
    changed = [name for name in header if found.get(name) != header[name]]
    if changed:
        there, here = (
            ", ".join(f"{name} {json.dumps(each.get(name))}" for name in changed)
            for each in (found, header)
        )
        raise RunError(
            f"{path} is of a run that asked something else: {there} there, {here} now; "
            "ask the same, or name another file"
        )
