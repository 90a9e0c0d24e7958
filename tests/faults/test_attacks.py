"""Short runs of `make attack` and of the soak."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.faults.attacks import attackers, harm, watch
from tests.faults.soak import LOST_BATCH, Sample, allowance, growth, slope, soak

ATTACKERS = 2
QUICK = (
    "empty parts",
    "empty standing tasks",
    "unknown fields",
    "incomplete messages of 33 MB",
    "resets",
)


@pytest.mark.timeout(300)
def test_attacks_do_not_reach_other_callers(tmp_path: Path) -> None:
    """No call of others fails, and memory stays, while each attack goes on."""
    with Server(tmp_path, "--model", "null") as server:
        watch(server.address, server.process.pid, 0.3)
        for name in QUICK:
            with attackers(server.address, name, ATTACKERS):
                figures = watch(server.address, server.process.pid, 0.5)
            assert harm(name, figures) == []
            assert figures.calls > 2


# ---------------------------------------------------------------- soak
# The soak finds what grows, and only that.

LEAK = """
import sys
from legato_service.__main__ import main
from legato_service.rpc.call_log import CallLog
record, kept = CallLog.record, []
def leak(self, *arguments):
    kept.append(bytearray(b"leak" * 1024))
    record(self, *arguments)
CallLog.record = leak
sys.exit(main())
"""
MAX_SLOPE = 1000.0  # bytes a call; a short run still warms up
CALLS = 1200


def series(per_call: float, *, files: int = 30, more_files: int = 0) -> list[Sample]:
    noise = (0, 40_000, -30_000, 10_000)
    return [
        Sample(
            calls=1000 * number,
            num_bytes=round(50e6 + per_call * 1000 * number) + noise[number % 4],
            files=files + more_files * number // 40,
            threads=8,
        )
        for number in range(40)
    ]


def test_noise_is_no_growth():
    assert growth(series(0.0), 10.0) == []
    assert abs(slope(series(0.0))) < 1.5


def test_a_slow_leak_is_found():
    (problem,) = growth(series(25.0), 10.0)
    assert problem.startswith("memory grows by 2")


def test_only_cancelled_calls_may_lose_memory():
    """As much as gRPC loses with each; the same growth without cancellations is a leak."""
    calls = Counter(
        {"query OK": 700, "detect cancelled OK": 100, "malformed INVALID_ARGUMENT": 100}
    )
    assert allowance(calls) == 0
    assert allowance(calls + Counter({"generate cancelled CANCELLED": 100})) == LOST_BATCH / 10
    assert growth(series(25.0), 10.0 + LOST_BATCH / 10) == []
    assert growth(series(60.0), 10.0 + LOST_BATCH / 10)


def test_descriptors_that_pile_up_are_found():
    (problem,) = growth(series(0.0, more_files=20), 10.0)
    assert problem.endswith("more files than at first")


@pytest.mark.parametrize("leaks", [False, True])
def test_a_real_server(tmp_path, leaks):
    """The same traffic against the server as it is, and against one that leaks 4 KB a call."""
    program = ("-c", LEAK) if leaks else ("-m", "legato_service")
    calls = CALLS // 2 if leaks else CALLS  # the leak is four times the limit
    with Server(tmp_path, "--model", "null", program=program) as server:
        report = asyncio.run(soak(server, calls=calls, callers=4, max_slope=MAX_SLOPE))
        server.settle()
    assert report.calls >= calls
    if leaks:
        assert [each for each in report.problems if each.startswith("service: memory grows by")]
    else:
        assert report.problems == []
