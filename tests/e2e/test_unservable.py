"""A configuration that cannot be served is told once, and the server leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import legato_tiny
import pytest
import safetensors.torch

from tests.e2e.server import ENVIRONMENT
from tests.engine.models.gguf import gguf_files


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        (("--model", "moondream2", "--weights", "."), "tokenizer", "needs a tokenizer.json"),
        (("--weights", "."), "weights", "no config.json"),
        (("--weights", "nowhere"), "weights", "no such file or folder: nowhere"),
        (("--model", "smollm2-135m", "--models", "."), "weights", "`legato pull smollm2-135m`"),
        pytest.param(
            ("--adapters", os.devnull), "adapters", "is not a folder", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--refiner", os.devnull),
            "refiner",
            "legato-tiny takes no refiner",
            marks=pytest.mark.slow,
        ),
        (
            ("--model", "random-tiny3", "--refiner", os.devnull),
            "refiner",
            "null cannot be read",
        ),
    ],
)
def test_what_cannot_be_served_is_said_once(
    tmp_path: Path, options: tuple[str, ...], field: str | None, reason: str
) -> None:
    """One line names the setting and what is wrong; no stack, no second engine, exit code 78."""
    refused_once(tmp_path, options, field, reason)


def refused_once(
    tmp_path: Path,
    options: tuple[str, ...],
    field: str | None,
    reason: str,
    environment: dict[str, str] = ENVIRONMENT,
) -> None:
    """Start a server that must say this once and exit."""
    ended = subprocess.run(
        [sys.executable, "-m", "legato_service", "--listen", "127.0.0.1:0", *options],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == os.EX_CONFIG
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    (refusal,) = [line for line in lines if line["event"] == "configuration_rejected"]
    assert reason in refusal["reason"]
    assert refusal.get("field") == field
    loading = [line["stage"] for line in lines if line["event"] == "loading"]
    assert len({*loading}) == len(loading), "it seems to start again"
    assert "Traceback" not in ended.stderr
    assert "engine_lost" not in ended.stderr


@pytest.mark.slow
def test_a_bad_tokenizer_is_said_once(tmp_path: Path) -> None:
    """The line names the file."""
    (tmp_path / "bad.json").write_text("[]")
    reason = "bad.json is not a byte-level tokenizer"
    refused_once(tmp_path, ("--tokenizer", "bad.json"), "tokenizer", reason)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_said_once(tmp_path: Path) -> None:
    """The line names the tensor and the file."""
    folder = tmp_path / "damaged"
    shutil.copytree(legato_tiny.path(), folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = max(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[-1] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    reason = f"{name} in {folder / 'model.safetensors'} holds numbers that are not finite"
    refused_once(tmp_path, ("--weights", str(folder)), "weights", reason)


def test_too_little_memory_is_said_once(tmp_path: Path) -> None:
    """The line says how much is needed and how much there is."""
    options = ("--max-running", "50000000")
    refused_once(tmp_path, options, "max_running", "the KV cache needs")


def test_a_long_temporary_folder_is_said_once(tmp_path: Path) -> None:
    """Its sockets could not be reached."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    refused_once(tmp_path, ("--model", "null"), "TMPDIR", "set TMPDIR to a shorter", environment)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_gguf_is_said_once(tmp_path: Path) -> None:
    """One engine, one line, no crash bundle."""
    gguf_files.write_small(tmp_path / "model.gguf", {"tokenizer.ggml.merges": ["no pair"]})
    options = ("--weights", "model.gguf", "--crash-folder", str(tmp_path / "crashes"))
    refused_once(tmp_path, options, "tokenizer", "the tokenizer of model.gguf cannot be read")
    assert not (tmp_path / "crashes").exists()
