"""Jumps of the wall clock: durations and deadlines are measured by the monotonic one."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL_CLOCK = {"time", "time_ns", "now", "utcnow", "today"}
# Stamps that are shown or sent, and expiries that people write as dates.
ALLOWED = {
    "service/legato_service/access/principal.py",
    "service/legato_service/images/intake.py",
    "service/legato_service/logs.py",
    "service/legato_service/rpc/call_log.py",
    "service/legato_service/services/image.py",
    "service/legato_service/session/session.py",
    "service/legato_service/tracing/tracer.py",
    "engine/legato_engine/crash.py",
    "engine/legato_engine/core/process.py",
}


def reads_wall_clock(source: str) -> bool:
    """Whether it calls `time.time()`, `time.time_ns()` or `datetime.now()`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            named = isinstance(owner, ast.Name) and owner.id in ("time", "datetime", "date")
            if named and node.func.attr in WALL_CLOCK:
                return True
    return False


def test_the_wall_clock_is_read_for_stamps_only():
    sources = [
        path
        for folder in ("service/legato_service", "engine/legato_engine")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in sources if reads_wall_clock(path.read_text())}
    assert found <= ALLOWED, f"durations by the wall clock? {sorted(found - ALLOWED)}"


def test_the_check_finds_the_wall_clock():
    assert reads_wall_clock("import time\nleft = deadline - time.time()")
    assert not reads_wall_clock("import time\nleft = deadline - time.monotonic()")
