"""A configuration that cannot be served is told once, and the server leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ENVIRONMENT


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        (("--model", "moondream2", "--weights", "nowhere"), "tokenizer", "needs a tokenizer.json"),
        (("--weights", "nowhere"), "weights", "no config.json"),
        (("--model", "moonbeam"), None, "no model is called 'moonbeam'"),
        (("--adapters", "nowhere"), "adapters", "is not a folder"),
        (("--refiner", "nowhere.pt"), "refiner", "legato-tiny takes no refiner"),
        (
            ("--model", "random-tiny3", "--refiner", "nowhere.pt"),
            "refiner",
            "nowhere.pt cannot be read",
        ),
    ],
)
def test_what_cannot_be_served_is_said_once(
    tmp_path: Path, options: tuple[str, ...], field: str | None, reason: str
) -> None:
    """One line names the setting and what is wrong; no stack, no second engine, exit code 1."""
    ended = subprocess.run(
        [sys.executable, "-m", "legato_service", "--listen", "127.0.0.1:0", *options],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    (refusal,) = [line for line in lines if line["event"] == "configuration_rejected"]
    assert reason in refusal["reason"]
    assert refusal.get("field") == field
    assert "Traceback" not in ended.stderr
    assert "engine_lost" not in ended.stderr
