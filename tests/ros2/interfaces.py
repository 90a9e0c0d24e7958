"""Message classes as rosidl generates them for Python, from the definitions that rosbags has.

Fields are checked as rosidl checks them: a float is no int, a byte is one of `bytes`. Definitions
of vision_msgs are those of the bags' tests, those of legato_msgs its own files.
"""

from __future__ import annotations

import array
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rosbags.typesys import get_types_from_msg

from tests.clients.python.ros.bags import typestore

ROS2 = Path(__file__).parents[2] / "ros2"
BASE, NAME, ARRAY, SEQUENCE = 1, 2, 3, 4  # rosbags' node types
STORE = typestore()
CLASSES: dict[str, type[Message]] = {}

_RANGES = {f"{u}int{n}": (-(2 ** (n - 1)) if not u else 0, 2 ** (n if u else n - 1) - 1)
           for u in ("", "u") for n in (8, 16, 32, 64)}  # fmt: skip
_TYPES: dict[str, type] = {"bool": bool, "string": str, "float32": float, "float64": float}
_DEFAULTS = {("geometry_msgs/msg/Quaternion", "w"): 1.0}


class Message:
    """Base of the classes; `TYPE` is the name as rosbags has it, `FIELDS` its parts."""

    TYPE = ""
    FIELDS: dict[str, Any] = {}  # noqa: RUF012 - set by each class, never changed

    def __init__(self, **values: Any) -> None:
        for field, kind in self.FIELDS.items():
            if field not in values:
                default = _DEFAULTS.get((self.TYPE, field))
                setattr(self, field, default_of(kind) if default is None else default)
        for field, value in values.items():
            setattr(self, field, value)

    def __setattr__(self, field: str, value: Any) -> None:
        assert field in self.FIELDS, f"{self.TYPE} has no field {field!r}"
        object.__setattr__(self, field, _checked(f"{self.TYPE}.{field}", self.FIELDS[field], value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and vars(self) == vars(other)

    def __hash__(self) -> int:
        raise TypeError(f"{self.TYPE} cannot be a key: its fields change")

    def __repr__(self) -> str:
        return f"{self.TYPE}({vars(self)})"


def default_of(kind: Any) -> Any:
    node, detail = kind
    if node == NAME:
        return CLASSES[detail]()
    if node == BASE:
        base = detail[0]
        return b"\0" if base == "byte" else _TYPES[base]() if base in _TYPES else 0
    return [default_of(detail[0]) for _ in range(detail[1] if node == ARRAY else 0)]


def _checked(where: str, kind: Any, value: Any) -> Any:
    node, detail = kind
    if node == NAME:
        assert isinstance(value, CLASSES[detail]), f"{where} is a {detail}, not {value!r}"
    elif node == BASE:
        _check_base(where, detail[0], value)
    else:
        element, size = detail
        if node == SEQUENCE and isinstance(value, array.array):
            assert (value.typecode, element) == ("B", (BASE, ("uint8", 0))), where
            return value
        assert not isinstance(value, str | dict), where
        if node == ARRAY:
            assert len(value) == size, f"{where} has {size} elements, not {len(value)}"
        for each in value:
            _checked(where, element, each)
        return list(value)
    return value


def _check_base(where: str, base: str, value: Any) -> None:
    if base == "byte":
        assert isinstance(value, bytes), where
        assert len(value) == 1, where
    elif base in _TYPES:
        assert isinstance(value, _TYPES[base]), f"{where} is {base}, not {value!r}"
    else:
        low, high = _RANGES[base]
        assert isinstance(value, int), f"{where} is {base}, not {value!r}"
        assert low <= value <= high, f"{where} is {base}, not {value!r}"


# ---------------------------------------------------------------- bytes


def to_cdr(message: Message) -> bytes:
    """Serialize a message, by rosbags."""
    return bytes(STORE.serialize_cdr(to_rosbags(message), message.TYPE))


def through_bytes(message: Message) -> Any:
    """Return what rosbags reads from a message's bytes: floats as short as their fields."""
    return STORE.deserialize_cdr(to_cdr(message), message.TYPE)


def to_rosbags(value: Any) -> Any:
    if isinstance(value, Message):
        parts = {field: _plain(kind, getattr(value, field)) for field, kind in value.FIELDS.items()}
        return STORE.types[value.TYPE](**parts)
    return value


def _plain(kind: Any, value: Any) -> Any:
    node, detail = kind
    if node == BASE:
        return value[0] if detail[0] == "byte" else value
    if node == NAME:
        return to_rosbags(value)
    (inner, inner_detail), _ = detail
    if inner == BASE and inner_detail[0] != "string":
        return np.array(value, dtype=inner_detail[0])
    return [to_rosbags(each) for each in value]


def from_other(name: str, other: Any) -> Message:
    """Convert a message of any library with the same fields."""
    cls, values = CLASSES[name], {}
    for field, kind in cls.FIELDS.items():
        values[field] = _own(kind, getattr(other, field))
    return cls(**values)


def _own(kind: Any, value: Any) -> Any:
    node, detail = kind
    if node == NAME:
        return from_other(detail, value)
    if node == BASE:
        return bytes([value]) if detail[0] == "byte" else _TYPES.get(detail[0], int)(value)
    element, _ = detail
    if element == (BASE, ("uint8", 0)):
        return array.array("B", bytes(value))
    return [_own(element, each) for each in value]


# ---------------------------------------------------------------- classes

_PARTS = {
    "msg": {"": 0},
    "srv": {"_Request": 0, "_Response": 1},
    "action": {"_Goal": 0, "_Result": 1, "_Feedback": 2},
}


def _register_own() -> dict[str, list[str]]:
    """Register legato_msgs; return the names by kind."""
    names: dict[str, list[str]] = {kind: [] for kind in _PARTS}
    for kind, parts in _PARTS.items():
        for path in sorted((ROS2 / "legato_msgs" / kind).glob(f"*.{kind}")):
            texts = path.read_text().split("---\n")
            assert len(texts) == len(parts), path
            names[kind].append(path.stem)
            for suffix, number in parts.items():
                name = f"legato_msgs/msg/{path.stem}{suffix}"
                STORE.register(get_types_from_msg(texts[number], name))
    return names


OWN = _register_own()
"""Messages, services and actions of legato_msgs, by folder."""


def modules() -> dict[str, ModuleType]:
    """Make the Python packages of all messages."""
    made: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        return made.setdefault(name, ModuleType(name))

    for name, (constants, fields) in STORE.fielddefs.items():
        package, _, short = name.split("/")
        members = {constant: _constant(kind, value) for constant, kind, value in constants}
        cls = type(short, (Message,), {**members, "TYPE": name, "FIELDS": dict(fields)})
        CLASSES[name] = cls
        module(package)
        setattr(module(f"{package}.msg"), short, cls)
    for kind in ("srv", "action"):
        module("legato_msgs")
        for short in OWN[kind]:
            parts = {
                suffix[1:]: CLASSES[f"legato_msgs/msg/{short}{suffix}"] for suffix in _PARTS[kind]
            }
            setattr(module(f"legato_msgs.{kind}"), short, type(short, (), parts))
    return made


def _constant(kind: str, value: Any) -> Any:
    return bytes([value]) if kind == "byte" else value
