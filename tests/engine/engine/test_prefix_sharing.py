"""Shared launches, mixed decodes included, give the same answers as separate ones."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.scheduler.batch import LaunchKind

from tests.adapters import random_adapter, safetensors_file
from tests.engine.speculative.test_speculation import TASKS, Run

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=7, page_size=4, max_prefill_rows=3
)


ADAPTERS = ("x", "y")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """One model with adapters, for all tests."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        tensors = random_adapter(tiny_random_config().text, 4 + 8 * seed, seed)
        (folder / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    made = assemble(msgspec.structs.replace(CONFIG, adapters=str(folder)))
    yield made
    made.device.close()


class Alone:
    """An assembly whose prompts share no launches."""

    def __init__(self, assembly):
        self._assembly = assembly

    def __getattr__(self, name):
        return getattr(self._assembly, name)

    def scheduler(self, sink, **options):
        """Return a scheduler without shared launches."""
        return self._assembly.scheduler(sink, shares=False, **options)


def run_all(assembly, seed, *, adapters=None, rounds=2, **options):
    """Run every skill `rounds` times, in bursts while others decode, some with logprobs."""
    draw, run = random.Random(seed), Run(assembly, **options)
    names = [(name, turn) for name in TASKS for turn in range(rounds)]
    for name, turn in draw.sample(names, len(names)):
        adapter = (adapters or {}).get(name)
        about = TASKS[name]
        run.submit(f"{name} {turn}", *about, seed=turn, adapter=adapter, logprobs=turn == 0)
        for _ in range(draw.choice((0, 0, 0, 0, 9))):
            run.scheduler.step()
    return run.finish()


def shared(run):
    """Return how many launches had mixed decodes, and how many several prompts."""
    plans = [record.launch.plan for record in run.records]
    return sum(plan.num_mixed_decodes > 0 for plan in plans), sum(
        len(plan.prefills) > 1 for plan in plans
    )


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_sharing_changes_no_answer(assembly, temperature):
    """Tokens, payloads, log-probabilities and events of every skill are equal, at both depths."""
    alone = run_all(Alone(assembly), 0, depth=1, temperature=temperature)
    assert shared(alone) == (0, 0)
    for seed, depth in ((0, 1), (1, 2), (2, 2)):
        run = run_all(assembly, seed, depth=depth, temperature=temperature)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0


def test_sharing_with_few_pages_changes_no_answer(assembly):
    """Also with mixed decodes that begin a page, and with preempted and repeated prefills."""
    alone = run_all(Alone(assembly), 0, temperature=0.8)
    longest = max(sequence.max_length for sequence in alone.sequences.values())
    scarce = dataclasses.replace(assembly, num_pages=longest // CONFIG.page_size + 12)
    for seed in (1, 2):
        run = run_all(scarce, seed, temperature=0.8)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0
        assert run.scheduler.load().kv.preemptions > 0


def test_adapters_share_and_change_no_answer(assembly):
    """Prompts and decodes with two adapters and without share launches."""
    folder, read = Path(assembly.config.adapters), assembly.model.read_adapter
    adapters = {
        skill: read((folder / f"{name}.safetensors").read_bytes(), name, 16)
        for skill, name in zip(TASKS, ADAPTERS, strict=False)
    }
    alone = run_all(Alone(assembly), 0, adapters=adapters)
    runs = [run_all(assembly, seed, adapters=adapters) for seed in (1, 2, 3)]
    assert all(run.answers == alone.answers for run in runs)
    assert alone.answers != run_all(Alone(assembly), 0).answers
    plans = [record.launch.plan for run in runs for record in run.records]
    keys = [
        tuple({row.sequence.adapter.key for row in rows} for rows in (plan.decodes, plan.prefills))
        for plan in plans
        if plan.kind is LaunchKind.PREFILL
    ]
    assert any(len(decodes) > 1 for decodes, _ in keys), "no decodes of different adapters"
    assert any(len(prompts) > 1 for _, prompts in keys), "no prompts of different adapters"


@pytest.mark.parametrize("count", [-1, 33])
def test_more_prompts_than_could_share_are_refused(count):
    """All prompts are sampled in one pass, which limits them; the error names the field."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, max_prefill_rows=count))
    assert caught.value.metadata["field"] == "max_prefill_rows"


@pytest.mark.parametrize("count", [0, 5])
def test_more_images_than_fit_are_refused(count):
    """Each image has page-locked memory of its own, which limits them."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, images_per_launch=count))
    assert caught.value.metadata["field"] == "images_per_launch"


def test_launches_are_not_shared_without_a_gain(assembly):
    """By default prompts that would run one after another have separate launches."""
    limits = assembly.runner.limits
    assert limits.prompts == CONFIG.max_prefill_rows
    default = assemble(msgspec.structs.replace(assembly.config, max_prefill_rows=0))
    assert default.runner.limits.prompts == 1
    default.device.close()
