"""Benchmarks that a CPU runs in a few seconds, and the options of all."""

import gc
import json

import pytest

from benchmarks.__main__ import BENCHMARKS, TOOLS, run

MODEL = "--device cpu --threads 1 --model random-tiny --random-weights"
SIZE = "--width 128 --height 96"
RUNS = {
    "decode": f"{MODEL} --streams 1 --length 24 --repeats 1",
    "drafting_paths": f"{MODEL} --streams 1 --length 16 --context 40 --repeats 1",
    "fp8": "--device cpu --crops 2 --repeats 1",
    "hop": f"{MODEL} {SIZE} --calls 2 --block 1 --tokens 1",
    "image": f"{MODEL} --sizes 128x96 --repeats 1 --device-stages",
    "intake": f"{SIZE} --calls 2 --block 1",
    "lone": f"{SIZE} --calls 2 --tokens 3 -- --model random-tiny --device cpu",
    "loops": f"{MODEL} --streams 1 --length 12 --context 40 --repeats 1"
    " --joins 1 --load 8 --steps 20",
    "parts": f"{MODEL} --callers 2 --words 20 --tokens 16 --turns 1",
    "prompts": f"{MODEL} --lengths 32 --repeats 1",
    "rpc": f"{SIZE} --alone 2 --callers 2 --calls 2 -- --model null",
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
    assert run(name, RUNS[name].split()) == 0
    assert json.loads((tmp_path / f"{name}.json").read_text())["figures"]


@pytest.mark.parametrize("module", [*BENCHMARKS, *TOOLS.values()])
def test_without_a_gpu_or_a_peer_it_tells_its_options(module, capsys):
    """What it imports at once is there."""
    with pytest.raises(SystemExit, match="0"):
        run(module, ["--help"])
    assert "usage: " in capsys.readouterr().out
