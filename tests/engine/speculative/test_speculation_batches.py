"""Speculation beside what else a launch may carry: few pages, adapters, log-probabilities."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble, with_speculation
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.types import DetectTask, QueryTask

from tests.adapters import random_adapter, safetensors_file
from tests.engine.speculative.test_speculation import Run, knowing

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=4, page_size=4)
RANKS = {"low": 2, "high": 9}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """One model for all tests, with pages of four positions and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        tensors = random_adapter(tiny_random_config().text, rank, seed)
        (folder / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    changes = {"adapters": str(folder), "adapter_slots": 2, "max_adapter_rank": 16}
    made = assemble(msgspec.structs.replace(CONFIG, **changes))
    yield made
    made.device.close()


def asked(run, names, *, adapters=None, logprobs=()):
    """Text questions and one detection, one after another."""
    for number, name in enumerate(names):
        adapter = (adapters or {}).get(name)
        boxes = name == "boxes"
        task = DetectTask(object="cat", max_objects=4) if boxes else QueryTask(question=f"{name}?")
        picture = 0 if boxes else None
        run.submit(name, task, picture, number, adapter=adapter, logprobs=name in logprobs)
        run.scheduler.step()
    return run.finish()


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_few_pages_change_no_answer(assembly, depth, block):
    """Where some have to give way, proposals take what is left, and all answer the same."""
    names = ("first", "second", "third", "fourth")
    plain = asked(Run(assembly, temperature=0.8), names)
    longest = max(sequence.max_length for sequence in plain.sequences.values())
    scarce = dataclasses.replace(assembly, num_pages=longest // CONFIG.page_size + 4)
    changed = with_speculation(scarce, f"fixed:{block}", knowing(scarce, plain, 0.7))
    run = asked(Run(changed, depth=depth, temperature=0.8), names)
    assert run.answers == plain.answers
    assert run.total("accepted") > 0
    report = run.scheduler.load().kv
    assert report.preemptions > 0
    assert report.draft == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_adapters_verify_in_their_slots(assembly, temperature):
    """Rows of two adapters and of none propose in one launch, and answer as they do without."""
    folder, read = Path(assembly.config.adapters), assembly.model.read_adapter
    adapters = {
        name: read((folder / f"{name}.safetensors").read_bytes(), name, 16) for name in RANKS
    }
    names = (*RANKS, "none", "boxes")
    plain = asked(Run(assembly, temperature=temperature), names, adapters=adapters)
    changed = with_speculation(assembly, "fixed:4", knowing(assembly, plain, 0.7))
    run = asked(Run(changed, temperature=temperature), names, adapters=adapters)
    assert run.answers == plain.answers
    both = [
        record
        for record in run.records
        if len({row.sequence.adapter.key for row in record.launch.plan.rows if row.num_drafts}) > 2
    ]
    assert sum(record.accepted for record in both) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_accepted_tokens_have_their_log_probabilities(assembly, temperature):
    """Every token of a block is told how likely it was, to the bit of plain decoding."""
    names = ("first", "second", "boxes")
    plain = asked(Run(assembly, temperature=temperature), names, logprobs=("first", "boxes"))
    assert all(isinstance(token[1], float) for token in plain.answers["first"].tokens)
    changed = with_speculation(assembly, "fixed:4", knowing(assembly, plain, 0.7))
    run = asked(Run(changed, temperature=temperature), names, logprobs=("first", "boxes"))
    assert run.answers == plain.answers
    assert run.total("accepted") > 0


def test_a_proposer_knows_what_was_found(assembly):
    """A prompt whose pages were found is read by the proposer like one that was computed."""
    plain = asked(Run(assembly), ("first",))
    changed = with_speculation(assembly, "fixed:8", knowing(assembly, plain, 1.0))
    run = Run(changed, depth=1)
    for name in ("first", "again"):
        run.submit(name, QueryTask(question="first?"))
        run.finish()
    assert run.sequences["again"].pages.cached_tokens > 0
    assert run.answers["again"] == run.answers["first"] == plain.answers["first"]
    accepted = [record.accepted for record in run.records]
    assert accepted[: len(accepted) // 2] == accepted[len(accepted) // 2 :]


def test_pages_are_cached_with_the_rate_that_the_device_learnt(assembly):
    """Eviction knows whose draft tokens were right."""
    names = ("good", "poor")
    plain = asked(Run(assembly, max_tokens=40), names)
    changed = with_speculation(assembly, "seed", knowing(assembly, plain, 1.0, 0.0))
    run = asked(Run(changed, max_tokens=40), names)
    assert run.answers == plain.answers
    learnt = [run.sequences[name].draft_stats.learnt.ema_acceptance_rate for name in names]
    assert learnt[0] > 0.8 > 0.5 > learnt[1]
    tree = run.scheduler._manager._tree
    leaves = {node.acceptance for node in tree.nodes() if node.pages and not node.children}
    assert leaves == set(learnt)
