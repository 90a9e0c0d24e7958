"""Failpoints: named places where tests inject faults.

`LEGATO_FAILPOINTS` holds entries `name=action`, separated by `;`. An action is `raise`, `exit`,
`kill`, `stop`, `hang`, `sleep(SECONDS)` or `corrupt`, and may end in `@N`: only the Nth hit of this
process (from 1), or in `%P`: each hit with a probability of P percent. With `name[TEXT]` only hits
count whose subject contains TEXT. Without the variable a failpoint costs one test of a global.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

import msgspec

VARIABLE = "LEGATO_FAILPOINTS"
EXIT_CODE = 86

_ENTRY = re.compile(
    r"(?P<name>[a-z_.]+)(?:\[(?P<subject>[^\]]*)\])?=(?P<action>raise|exit|kill|stop|hang|corrupt|sleep\((?P<seconds>[0-9.]+)\))"
    r"(?:@(?P<hit>[0-9]+)|%(?P<percent>[0-9.]+))?"
)


class InjectedFault(Exception):
    """Raised by a failpoint with the action `raise`."""


class _Failpoint(msgspec.Struct):
    action: str
    seconds: float
    only_hit: int  # 0: every one
    probability: float
    subject: str = ""
    hits: int = 0


def _parse(text: str) -> dict[str, _Failpoint]:
    found = {}
    for entry in filter(None, (each.strip() for each in text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{VARIABLE}: malformed entry {entry!r}")
        found[match["name"]] = _Failpoint(
            action=match["action"].partition("(")[0],
            seconds=float(match["seconds"] or 0),
            only_hit=int(match["hit"] or 0),
            probability=float(match["percent"] or 100) / 100,
            subject=match["subject"] or "",
        )
    return found


_points = _parse(os.environ.get(VARIABLE, ""))
ACTIVE = bool(_points)


def hit(name: str, subject: str = "") -> bool:
    """Run the action of a failpoint; return whether the site must corrupt its own data.

    `subject` describes what the site works on.

    Raises:
        InjectedFault: the action is `raise`.
    """
    if not ACTIVE:
        return False
    point = _points.get(name)
    if point is None or point.subject not in subject:
        return False
    point.hits += 1
    if point.only_hit not in (0, point.hits) or random.random() >= point.probability:
        return False
    if point.action == "corrupt":
        return True
    _ACTIONS[point.action](point, name)
    return False


def _raise(_: _Failpoint, name: str) -> None:
    raise InjectedFault(name)


def _sleep(point: _Failpoint, _: str) -> None:
    time.sleep(point.seconds)


def _hang(*_: object) -> None:
    while True:
        time.sleep(3600)


_ACTIONS: dict[str, Callable[[_Failpoint, str], None]] = {
    "raise": _raise,
    "exit": lambda *_: os._exit(EXIT_CODE),
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": _sleep,
    "hang": _hang,
}
