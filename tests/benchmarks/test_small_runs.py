"""Benchmarks that a CPU runs in a few seconds, and the options of all."""

import gc
import json
import sys

import pytest

from benchmarks.__main__ import BENCHMARKS, TOOLS, main, run

MODEL = "--device cpu --threads 1 --model random-tiny --random-weights"
SIZE = "--width 128 --height 96"
RUNS = {
    "decode": f"{MODEL} --streams 1 --length 24 --repeats 1",
    "drafting_paths": f"{MODEL} --streams 1 --length 16 --context 40 --repeats 1",
    "fp8": "--device cpu --crops 2 --repeats 1",
    "hop": f"{MODEL} {SIZE} --calls 1 --block 1 --tokens 1",
    "image": f"{MODEL} --sizes 128x96 --repeats 1 --device-stages",
    "intake": f"{SIZE} --calls 1 --block 1",
    "lift": "--scenes 1",
    "lone": f"{SIZE} --calls 1 --tokens 1 -- --model random-tiny --device cpu",
    "loops": f"{MODEL} --streams 1 --length 12 --context 40 --repeats 1"
    " --joins 1 --load 8 --steps 20",
    "loops alone": f"{MODEL} --streams 1 --length 3 --context 20 --repeats 1"
    " --joins 0 --load 0 --steps 0",
    "parts": f"{MODEL} --callers 2 --words 20 --tokens 16 --turns 1",
    "prompts": f"{MODEL} --lengths 32 --repeats 1",
    "telemetry": "--turns 1 --calls 1 --name telemetry",
    "access": "--blocks 1 --calls 1",
    "tick": "--ticks 1",
    "rpc": f"{SIZE} --alone 1 --callers 1 --calls 1 -- --model null",
}


@pytest.fixture
def _usual_collections():
    """Undo what an engine's process asks of the garbage collector."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("_usual_collections")
@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_writes_its_record(name, tmp_path, monkeypatch):
    """It ends well, with figures."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    benchmark = name.partition(" ")[0]
    assert run(benchmark, RUNS[name].split()) == 0
    assert json.loads((tmp_path / f"{benchmark}.json").read_text())["figures"]


def test_the_help_names_each_benchmark_and_its_question(capsys, monkeypatch):
    """`python -m benchmarks --help` starts nothing."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert all(name in shown and each.question in shown for name, each in BENCHMARKS.items())


@pytest.mark.parametrize("name", [*BENCHMARKS, *TOOLS])
def test_without_a_gpu_or_a_peer_it_tells_its_options(name, capsys):
    """What it imports at once is there."""
    with pytest.raises(SystemExit, match="0"):
        run(name, ["--help"])
    assert "usage: " in capsys.readouterr().out
