"""Bounds of request messages, checked on their bytes before they are parsed.

A parser makes an object of every message inside a message, so that 16 MiB of empty ones take
seconds and hundreds of megabytes. This check stops at the first entry too many. The bounds are
those of the contract, `legato.v1.limits`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from legato.v1 import inference_pb2, limits
from legato.v1.limits import Limit
from legato_engine.errors import InvalidField, InvalidRequest, PromptTooLong

FOREIGN_MAX_BYTES = 4096
"""Maximum bytes of a request outside the contract: health check or reflection."""

_PACKAGES = ("legato.v1", "inference")
_ALONE = {("Frame", "image"), ("Frame", "extra_tasks")}
"""Errors in these fields fail the frame's tasks, not the session, and are found later."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_VARINT = 10  # bytes
_CONTINUED = bytes(range(0x80, 0x100))  # all bytes of a varint but its last
_MAX_TIME = 64  # bytes of a duration or a timestamp
_MAX_LOOKS, _MAX_OPTIONS = 64, 4096  # fields and bytes, on the search for a request's id
_TIMES: dict[str, Callable[[bytes], Any]] = {
    "google.protobuf.Duration": duration_pb2.Duration.FromString,
    "google.protobuf.Timestamp": timestamp_pb2.Timestamp.FromString,
}
_D = FieldDescriptor
_FLOATS = {_D.TYPE_FLOAT: ("<f", "f", 4), _D.TYPE_DOUBLE: ("<d", "d", 8)}
_BITS = {_D.TYPE_INT32: (32, True), _D.TYPE_INT64: (64, True), _D.TYPE_UINT32: (32, False)}
_UNKNOWN_COST = 64  # per unknown field, so that a request has at most 256 of them

Path: TypeAlias = "tuple[Path, _Field, int] | None"
"""Path of a field: its message's path, the field, and its index in a repeated field."""


class RequestKind:
    """A type of request message, with its bounds."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._fields = _fields_of(descriptor, True)
        is_foreign = descriptor.file.package not in _PACKAGES
        default = FOREIGN_MAX_BYTES if is_foreign else limits.MESSAGE_MAX_BYTES
        self._max_bytes = limits.MAX_BYTES.get(descriptor.name, default)
        self._is_foreign = is_foreign

    def check(self, data: bytes, prefix: str = "") -> None:
        """Check a serialized message; its fields are named with `prefix`.

        Raises:
            InvalidField: a field is out of its bounds.
            PromptTooLong: a text of the prompt is too long.
            InvalidRequest: the bytes are no message.
        """
        if self._is_foreign and len(data) > self._max_bytes:  # its fields have no bounds
            raise InvalidRequest(
                f"the request has {len(data)} bytes, the limit is {self._max_bytes}",
                limit=self._max_bytes,
                actual=len(data),
            )
        scan = _Scan(data, prefix)
        try:
            scan.message(self._fields, 0, len(data), None, {})
        except IndexError:
            raise _malformed() from None
        actual = len(data) - scan.image_bytes
        if actual > self._max_bytes:
            largest = max(scan.sizes, key=scan.sizes.__getitem__, default=0)
            field = self._fields.get(largest)
            raise InvalidField(
                f"{actual} bytes without those of an image, the limit is {self._max_bytes}",
                field=prefix + (field.name if field is not None else ""),
                limit=self._max_bytes,
                actual=actual,
            )

    def request_id(self, data: bytes) -> str:
        """Return the id that a refused request names itself by; empty if none is found soon."""
        found, at, scan = "", 0, _Scan(data, "")
        with contextlib.suppress(IndexError, InvalidRequest, DecodeError):
            for _ in range(_MAX_LOOKS):
                tag, at = scan.varint(at)
                if tag & 7 == _DELIMITED:
                    size, at = scan.varint(at)
                    field = self._fields.get(tag)
                    if field is not None and field.name == "options" and size <= _MAX_OPTIONS:
                        options = inference_pb2.RequestOptions.FromString(data[at : at + size])
                        found = options.request_id or found
                    at += size
                elif tag & 7 == _VARINT:
                    _, at = scan.varint(at)
                else:
                    at += 4 if tag & 7 == _FIXED32 else 8
        return found


@functools.cache
def kind_of(descriptor: Descriptor) -> RequestKind:
    return RequestKind(descriptor)


Fields: TypeAlias = "dict[int, _Field]"
"""The fields of a message by their tags on the wire."""


@functools.cache
def _fields_of(descriptor: Descriptor, checked: bool) -> Fields:
    """Return the fields of a message; without `checked` nothing is bounded."""
    fields: Fields = {}
    is_ours = descriptor.file.package in _PACKAGES
    bounds = limits.FIELDS.get(descriptor.name, {}) if is_ours else {}
    for each in descriptor.fields:
        is_checked = checked and (descriptor.name, each.name) not in _ALONE
        bound = bounds.get(each.name, Limit())
        if not is_checked:
            bound = Limit(image=bound.image)
        field = _Field(each, bound, checked=is_checked)
        fields[each.number << 3 | field.wire] = field
        if each.is_repeated and field.wire != _DELIMITED:
            fields[each.number << 3 | _DELIMITED] = field
    return fields


class _Field:
    """A field with its bounds."""

    def __init__(self, field: FieldDescriptor, bound: Limit, *, checked: bool) -> None:
        self.name = field.name
        self.bound = bound
        self.is_repeated = field.is_repeated
        self.is_image = bound.image
        self.is_text = bound.max_characters is not None or bound.max_bytes is not None
        self.max_count = bound.max_items if field.is_repeated else None
        self.wire = _wire(field)
        self.floats = _FLOATS.get(field.type)
        self.bits = _BITS.get(field.type, (64, False))
        self.least = bound.above if bound.above is not None else bound.min
        # Unsigned numbers whose only bound is 0 need no check.
        is_bounded = bool(self.least) or bound.max is not None or bool(self.bits[1])
        self.is_number = checked and (self.floats is not None or is_bounded)
        self.fields: Fields | None = None  # of a message that is read on
        self.time: Callable[[bytes], Any] | None = None
        self.is_merged = False  # by a parser, where the field is given several times
        message = field.message_type
        if message is not None:
            self.time = _TIMES.get(message.full_name) if checked else None
            if self.time is None:
                self.fields = _fields_of(message, checked)
            else:
                self.max_count = 1  # of the seconds of one and the nanoseconds of another
            self.is_merged = self.fields is not None and not field.is_repeated


def _wire(field: FieldDescriptor) -> int:
    match field.type:
        case _D.TYPE_FLOAT | _D.TYPE_FIXED32 | _D.TYPE_SFIXED32:
            return _FIXED32
        case _D.TYPE_DOUBLE | _D.TYPE_FIXED64 | _D.TYPE_SFIXED64:
            return _FIXED64
        case _D.TYPE_STRING | _D.TYPE_BYTES | _D.TYPE_MESSAGE:
            return _DELIMITED
    return _VARINT


class _Scan:
    """Single pass over the bytes of a message."""

    __slots__ = ("data", "image_bytes", "left", "prefix", "sizes")

    def __init__(self, data: bytes, prefix: str) -> None:
        self.data = data
        self.prefix = prefix
        self.image_bytes = 0
        self.left = limits.MAX_FIELDS
        self.sizes: dict[int, int] = {}  # bytes of the outermost message's fields, by tag

    def message(  # noqa: C901 - the loop over all fields: a call for each part would double its time
        self, fields: Fields, at: int, end: int, path: Path, counts: dict[_Field, Any]
    ) -> None:
        """Check the message in these bytes.

        `counts` has the entries of bounded fields so far, and the counts of merged messages.

        Raises:
            IndexError: the bytes end within a number.
        """
        data = self.data
        while at < end:
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = self.varint(at - 1)
            field = fields.get(tag)
            self.left -= 1 if field is not None else _UNKNOWN_COST
            if self.left < 0:
                raise self._invalid(
                    f"more than {limits.MAX_FIELDS} fields", path, limits.MAX_FIELDS
                )
            count = self._counted(field, path, counts) if field is not None else 0
            wire = tag & 7
            if wire not in (_DELIMITED, _VARINT):
                at = self._fixed(field, wire, at, path, count)
                continue
            value = data[at]  # or the size
            at += 1
            if value > 0x7F:
                value, at = self.varint(at - 1)
            if wire == _DELIMITED:
                if at + value > end:
                    raise _malformed()
                if path is None:
                    self.sizes[tag] = self.sizes.get(tag, 0) + value
                if field is not None:
                    self._delimited(field, at, value, path, count, counts)
                at += value
            elif field is not None and field.is_number:
                self._number(field, _integer(value, *field.bits), (path, field, count))
        if at != end:
            raise _malformed()

    def _counted(self, field: _Field, path: Path, counts: dict[_Field, Any]) -> int:
        """Return how many entries of the field came before this one."""
        if field.max_count is None:
            return 0
        count: int = counts.get(field, 0)
        if count >= field.max_count:
            raise self._too_many(field, path)
        counts[field] = count + 1
        return count

    def _delimited(
        self, field: _Field, at: int, size: int, path: Path, count: int, counts: dict[_Field, Any]
    ) -> None:
        if field.fields is not None:
            inner = counts.setdefault(field, {}) if field.is_merged else {}
            self.message(field.fields, at, at + size, (path, field, count), inner)
        elif field.is_image:
            self.image_bytes += size
        elif field.is_text:
            self._text(field, at, size, (path, field, count))
        elif field.time is not None:
            self._time(field, at, size, (path, field, count))
        elif field.max_count is not None and field.wire != _DELIMITED:
            counts[field] = count + self._packed(field, at, at + size, path)
            if counts[field] > field.max_count:
                raise self._too_many(field, path)

    def _fixed(self, field: _Field | None, wire: int, at: int, path: Path, count: int) -> int:
        """Check a number of four or eight bytes; return where it ends."""
        size = {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
        if size == 0 or at + size > len(self.data):  # groups, which the contract does not have
            raise _malformed()
        if field is not None and field.floats is not None and field.is_number:
            (number,) = struct.unpack_from(field.floats[0], self.data, at)
            self._number(field, number, (path, field, count))
        return at + size

    def varint(self, at: int) -> tuple[int, int]:
        data, value = self.data, 0
        for shift in range(0, 7 * _MAX_VARINT, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise _malformed()

    def _number(self, field: _Field, value: float, path: Path) -> None:
        least, above, limit = field.least, field.bound.above, field.bound.max
        if (
            (least is None or value >= least)
            and (limit is None or value <= limit)
            and value != above
            and (field.floats is None or math.isfinite(value))
        ):
            return
        raise self._invalid(_rule(field.bound), path, None, f"{value:g}")

    def _packed(self, field: _Field, at: int, end: int, path: Path) -> int:
        """Check a run of numbers; return how many there are."""
        if field.floats is None:
            return len(self.data[at:end].translate(None, _CONTINUED))
        _, code, size = field.floats
        if (end - at) % size:
            raise _malformed()
        values = array(code, self.data[at:end])
        least, greatest = field.least, field.bound.max
        if values and not (
            math.isfinite(sum(values))
            and (least is None or min(values) >= least)
            and (greatest is None or max(values) <= greatest)
        ):
            for index, value in enumerate(values):
                self._number(field, value, (path, field, index))
        return len(values)

    def _text(self, field: _Field, at: int, size: int, path: Path) -> None:
        limit = field.bound.max_characters
        if limit is None:
            limit = field.bound.max_bytes or 0
            if size > limit:
                raise self._invalid(f"{size} bytes, the limit is {limit}", path, limit, str(size))
            return
        if size <= limit:
            return
        if size > 4 * limit:  # a character has at most four bytes
            problem = f"{size} bytes of text, the limit is {limit} characters"
            raise self._invalid(problem, path, limit, str(size))
        actual = len(self.data[at : at + size].decode(errors="replace"))
        if actual > limit:
            problem = f"{actual} characters, the limit is {limit}"
            raise self._invalid(problem, path, limit, str(actual))

    def _time(self, field: _Field, at: int, size: int, path: Path) -> None:
        if size > _MAX_TIME:
            raise self._invalid("more than two numbers", path, _MAX_TIME, str(size))
        assert field.time is not None, "checked by the caller"
        try:
            message = field.time(self.data[at : at + size])
        except DecodeError:
            raise _malformed() from None
        try:
            message.ToNanoseconds()  # checks its own bounds
        except ValueError:
            problem = (
                f"{message.seconds} s and {message.nanos} ns are no time; {_rule(field.bound)}"
            )
            raise self._invalid(problem, path, None, str(message.seconds)) from None
        self._number(field, message.seconds + message.nanos / 1e9, path)

    def _too_many(self, field: _Field, path: Path) -> InvalidField:
        limit = field.max_count or 0
        problem = f"more than {limit} entries" if field.is_repeated else "given more than once"
        named = self._invalid(problem, (path, field, -1), limit, f"more than {limit}")
        assert isinstance(named, InvalidField), "a list is no text"
        return named

    def _invalid(
        self, message: str, path: Path, limit: float | None, actual: str = ""
    ) -> InvalidRequest:
        metadata = {"field": self.prefix + _name(path)}
        if limit is not None:
            metadata["limit"] = f"{limit}"
        if actual:
            metadata["actual"] = actual
        is_prompt = path is not None and path[1].bound.prompt
        return (PromptTooLong if is_prompt else InvalidField)(message, **metadata)


def _name(path: Path) -> str:
    """Return `tasks[1].detect.object`; without an index for a count of -1."""
    parts: list[str] = []
    while path is not None:
        path, field, index = path
        parts.append(f"{field.name}[{index}]" if field.is_repeated and index >= 0 else field.name)
    return ".".join(reversed(parts))


def _rule(bound: Limit) -> str:
    if bound.above is not None:
        maximum = "" if bound.max is None else f" and at most {bound.max:.15g}"
        return f"must be above {bound.above:g}{maximum}"
    if bound.max is None:
        return (
            "must be finite" if bound.min is None else f"must be finite and at least {bound.min:g}"
        )
    return f"must be {0 if bound.min is None else bound.min:.15g} to {bound.max:.15g}"


def _integer(value: int, bits: int, signed: bool) -> int:
    """Return the number that a parser makes of a varint."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def _malformed() -> InvalidRequest:
    return InvalidRequest("the request is not a valid protobuf message")
