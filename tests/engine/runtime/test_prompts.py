"""Prompts in captured passes: the answers of eager ones, and nothing runs outside a graph."""

from __future__ import annotations

import pytest
from legato_engine.core import assembly as assembly_module
from legato_engine.runtime import prompts
from legato_engine.runtime.prompts import CapturedPrompts
from legato_engine.runtime.torch_backend import TorchBackend

from tests.adapters import PeftAdapter
from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder, test_decoders
from tests.fake_device import GraphDevice
from tests.gpu.guard import GraphsOnly, GuardViolation

SIZE = 64
"""Tokens of the largest pass."""


def engine(monkeypatch, name, folder, *, captures=True, **settings):
    """Return an engine whose prompts run in passes of up to `SIZE` tokens, captured or eagerly."""
    monkeypatch.setattr(assembly_module, "open_device", lambda *_: GraphDevice())
    made = same.Engine(name, folder, cpu_kernels="torch", **settings)
    if captures:
        backend = made.assembly.runner._backend
        assert isinstance(backend, TorchBackend)
        backend._prompts = CapturedPrompts.of_any_length(backend._resources, SIZE)
        backend._prompts.warm_up()
    return made


CONFIGS = {"phi": hub_folder.phi, "llama": test_decoders.config}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """Return a model's name and folder; its query heads share key heads."""
    name, path = request.param, tmp_path_factory.mktemp(request.param)
    hub_folder.write(path, CONFIGS[name](num_key_value_heads=2), chat=hub_folder.CHAT)
    return name, path


QUESTIONS = ["?", "why is it? " * 3, "tell me all of it " * 5, "x y " * 40]
"""Prompts of one small pass, of one of the largest size, and of several."""


def test_captured_prompts_answer_as_eager_ones(monkeypatch, model, tmp_path):
    """Prompts of any length, beside decodes and with adapters, have the tokens of eager ones.

    Nothing but graphs runs from their arrival to their end, and none is captured meanwhile.
    """
    answers = []
    for captures in (False, True):
        with engine(monkeypatch, *model, captures=captures, adapters=str(tmp_path)) as each:
            lengths = [len(each.prompt(question)) for question in QUESTIONS]
            assert lengths[0] < 32 < lengths[1] < SIZE < 2 * SIZE < lengths[-1]
            own = each.assembly.model
            data, settings = PeftAdapter.fitting(own._targets, rank=4).files()
            adapters = [None, own.read_adapter(data, "key", 8, settings)] * 2
            depth, device = 1 + captures, each.assembly.device
            for order in (QUESTIONS, QUESTIONS[::-1]):
                tokens = each.ask(order, depth, adapters=adapters, max_tokens=8).tokens
                answers.append(tokens)
            if captures:
                before = device.num_captured
                with GraphsOnly("cpu"):
                    quiet = each.ask(QUESTIONS, adapters=adapters, max_tokens=8)
                assert device.num_captured == before
                assert quiet.tokens == answers[0]
    assert answers[:2] == answers[2:]
    assert len({*map(tuple, answers[0].values())}) > 2


def test_prompts_run_eagerly_beyond_the_longest_pass(monkeypatch, model):
    """A prompt's first parts may be captured and its last ones not; tokens stay the same."""
    answers = []
    for most in (2048, SIZE):
        monkeypatch.setattr(prompts, "_MOST_POSITIONS", most)
        with engine(monkeypatch, *model) as each:
            answers.append(each.ask(QUESTIONS, max_tokens=8).tokens)
            if most == SIZE:
                with GraphsOnly("cpu"), pytest.raises(GuardViolation):
                    each.ask(QUESTIONS[-1:], max_tokens=8)
    assert answers[0] == answers[1]
