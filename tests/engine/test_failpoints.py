"""Failpoints from the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from legato_engine import failpoints


def run(text: str, code: str) -> subprocess.CompletedProcess[str]:
    script = f"from legato_engine import failpoints\n{code}"
    environment = {**os.environ, failpoints.VARIABLE: text}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )


def test_without_the_variable_nothing_happens():
    assert run("", "print(failpoints.ACTIVE, failpoints.hit('a'))").stdout == "False False\n"


def test_only_the_numbered_hit_raises():
    code = "failpoints.hit('a.b'); failpoints.hit('a.b')"
    assert "InjectedFault: a.b" in run("a.b=raise@2", code).stderr
    assert run("a.b=raise@3", code).returncode == 0


@pytest.mark.parametrize(
    ("action", "code"), [("exit", failpoints.EXIT_CODE), ("kill", -signal.SIGKILL)]
)
def test_the_process_ends(action: str, code: int) -> None:
    assert run(f"a={action}", "failpoints.hit('a')").returncode == code


def test_corruption_is_left_to_the_site():
    assert run("a=corrupt", "print(failpoints.hit('a'), failpoints.hit('b'))").stdout == (
        "True False\n"
    )


def test_a_share_of_the_hits():
    code = "print(sum(failpoints.hit('a') for _ in range(10000)))"
    assert 2500 < int(run("a=corrupt%30", code).stdout) < 3500


def test_only_hits_on_the_subject_count() -> None:
    code = "print([failpoints.hit('a', each) for each in ('is xy', 'is z', 'xyz')])"
    assert run("a[xy]=corrupt@2", code).stdout == "[False, False, True]\n"


def test_malformed_entries_are_refused():
    assert "malformed entry 'a=explode'" in run("a=explode", "").stderr
