"""Prompts that share a launch, and decodes that ride along, give the answers they give alone."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest
from legato_engine.config import EngineConfig
from legato_engine.engine.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.scheduler.launch import LaunchKind

from tests.adapters import random_adapter, safetensors_file
from tests.engine.speculative.test_speculation import TASKS, Run

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=7, page_size=4, max_prefill_rows=3
)


ADAPTERS = ("x", "y")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """One model for all tests, that has adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        tensors = random_adapter(tiny_random_config().text, 4 + 8 * seed, seed)
        (folder / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    made = assemble(msgspec.structs.replace(CONFIG, adapters=str(folder)))
    yield made
    made.device.close()


class Alone:
    """An assembly whose prompts share nothing."""

    def __init__(self, assembly):
        self._assembly = assembly

    def __getattr__(self, name):
        return getattr(self._assembly, name)

    def scheduler(self, sink, **options):
        """The same without sharing."""
        return self._assembly.scheduler(sink, shares=False, **options)


def asked(assembly, seed, *, adapters=None, rounds=2, **options):
    """Every skill some times, in bursts while others decode; every other one tells logprobs."""
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
    """How many launches had riders, and how many several prompts."""
    plans = [record.launch.plan for record in run.records]
    return sum(plan.num_mixed_decodes > 0 for plan in plans), sum(
        len(plan.prefills) > 1 for plan in plans
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sharing_changes_no_answer(assembly, temperature):
    """Tokens, values, log-probabilities and events of every skill, at both depths."""
    alone = asked(Alone(assembly), 0, depth=1, temperature=temperature)
    assert shared(alone) == (0, 0)
    for seed, depth in ((0, 1), (1, 2), (2, 2)):
        run = asked(assembly, seed, depth=depth, temperature=temperature)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0


def test_sharing_with_few_pages_changes_no_answer(assembly):
    """Rows that begin a page as they ride, and those that are preempted and prefilled again."""
    alone = asked(Alone(assembly), 0, temperature=0.8)
    longest = max(sequence.max_length for sequence in alone.sequences.values())
    scarce = dataclasses.replace(assembly, num_pages=longest // CONFIG.page_size + 12)
    for seed in (1, 2):
        run = asked(scarce, seed, temperature=0.8)
        assert run.answers == alone.answers
        assert min(shared(run)) > 0
        assert run.scheduler.load().kv.preemptions > 0


def test_adapters_share_and_change_no_answer(assembly):
    """Prompts and riders of two adapters and of none have their own answers in one launch."""
    folder, read = Path(assembly.config.adapters), assembly.model.read_adapter
    adapters = {
        skill: read((folder / f"{name}.safetensors").read_bytes(), name, 16)
        for skill, name in zip(TASKS, ADAPTERS, strict=False)
    }
    alone = asked(Alone(assembly), 0, adapters=adapters)
    runs = [asked(assembly, seed, adapters=adapters) for seed in (1, 2, 3)]
    assert all(run.answers == alone.answers for run in runs)
    assert alone.answers != asked(Alone(assembly), 0).answers
    plans = [record.launch.plan for run in runs for record in run.records]
    keys = [
        tuple({row.sequence.adapter.key for row in rows} for rows in (plan.decodes, plan.prefills))
        for plan in plans
        if plan.kind is LaunchKind.PREFILL
    ]
    assert any(len(riding) > 1 for riding, _ in keys), "riders of different adapters"
    assert any(len(prompts) > 1 for _, prompts in keys), "prompts of different adapters"


@pytest.mark.parametrize("count", [-1, 33])
def test_more_prompts_than_could_share_are_refused(count):
    """Every prompt is sampled from in one pass, so there is a most, and its name is told."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, max_prefill_rows=count))
    assert caught.value.metadata["field"] == "max_prefill_rows"


@pytest.mark.parametrize("count", [0, 5])
def test_more_pictures_than_there_is_room_for_are_refused(count):
    """Each has page-locked memory of its own, so there is a most."""
    with pytest.raises(InvalidField) as caught:
        assemble(msgspec.structs.replace(CONFIG, pictures_per_launch=count))
    assert caught.value.metadata["field"] == "pictures_per_launch"


def test_nothing_is_shared_where_nothing_is_gained(assembly):
    """By default prompts that would run one after another have launches of their own."""
    limits = assembly.runner.limits
    assert limits.prompts == CONFIG.max_prefill_rows
    default = assemble(msgspec.structs.replace(assembly.config, max_prefill_rows=0))
    assert default.runner.limits.prompts == 1
    default.device.close()
