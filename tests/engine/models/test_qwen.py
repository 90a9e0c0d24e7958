"""Qwen 2 and 3 as transformers computes them, and configurations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.registry import resolve

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder

VERSIONS = ("qwen2", "qwen3")


def config(kind, **fields):
    """Two layers, six heads of queries and two of keys."""
    sizes: dict[str, Any] = {
        "vocab_size": hub_folder.VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    if kind == "qwen3":
        sizes["head_dim"] = 24
    from transformers import Qwen2Config, Qwen3Config  # takes seconds, not needed by most

    kinds = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return kinds[kind](**(sizes | fields))


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as Qwen 2.5": ("qwen2", {}),
    "as Qwen 2.5 0.5B": ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 12}),
    "as Qwen 3": ("qwen3", {}),
    "as Qwen 3 0.6B": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 45])
def test_logits_are_those_of_transformers(tmp_path, kind, length):
    """Prefill and decode, within a page and across pages."""
    version, fields = KINDS[kind]
    theirs = hub_folder.write(tmp_path, config(version, **fields))
    same.check_prefill_and_decode(same.load("qwen", tmp_path), theirs, length=length)


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_answers_are_those_of_transformers(tmp_path, version):
    """A hundred prompts each, in the turns of a chat."""
    theirs = hub_folder.write(tmp_path, config(version), chat=hub_folder.CHAT)
    same.check_greedy("qwen", tmp_path, theirs, count=100)


@pytest.mark.parametrize("version", VERSIONS)
def test_neither_batch_nor_depth_changes_an_answer(tmp_path, version):
    """With normed heads, a row has the same bits in any batch."""
    hub_folder.write(tmp_path, config(version))
    asked = same.questions(9, seed=5)
    with same.Engine("qwen", tmp_path) as engine:
        sampling = {"max_tokens": 10, "temperature": 1.0}
        first = engine.ask(asked, **sampling).tokens
        assert engine.ask(asked, depth=1, **sampling).tokens == first
        assert engine.ask(asked, together=False, **sampling).tokens == first


def test_thinking_is_switched_off(tmp_path):
    """Templates with a thinking switch have it off."""
    thinks = "{{ messages[0]['content'] }}{% if enable_thinking is false %} at once{% endif %}"
    hub_folder.write(tmp_path, config("qwen3"), chat=thinks)
    with same.Engine("qwen", tmp_path) as engine:
        tokenizer = hub_folder.byte_level_tokenizer()
        assert engine.prompt("why?") == tokenizer.encode("why? at once").ids


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', not 'qwen2' or 'qwen3'"),
    ],
)
def test_fields_that_are_not_implemented_are_named(tmp_path, version, fields, message):
    """Fields that would change answers and are not implemented are refused at load."""
    hub_folder.write(tmp_path, config(version))
    hub_folder.change(tmp_path / "config.json", **fields)
    with pytest.raises(InvalidField) as caught:
        resolve("qwen", weights=str(tmp_path))
    assert message in caught.value.message
