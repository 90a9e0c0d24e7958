"""Llama, Phi and Qwen as transformers computes them, and configurations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.registry import resolve
from legato_engine.types import PromptToken
from safetensors.torch import load_file, save_file

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.paged_session import PagedSession


def config(**fields):
    """Two layers, four heads of queries and two of keys, 16 wide."""
    sizes: dict[str, Any] = {
        "vocab_size": hub_folder.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "architectures": ["LlamaForCausalLM"],
    }
    from transformers import LlamaConfig  # takes seconds, not needed by most

    return LlamaConfig(**(sizes | fields))


KINDS: dict[str, dict[str, Any]] = {
    "as Llama 2": {"num_key_value_heads": 4},
    "as Llama 3.1": {"rope_parameters": same.LLAMA3},
    "as Llama 3.2": {"rope_parameters": same.LLAMA3, "tie_word_embeddings": True},
    "one head of keys": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "wide heads, biased": {"head_dim": 40, "attention_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "eight to a group": {"num_attention_heads": 16, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 45, 150])
def test_logits_are_those_of_transformers(tmp_path, kind, length):
    """Prefill and decode, within a page, across pages, and after the first context."""
    theirs = hub_folder.write(tmp_path, config(**KINDS[kind]))
    same.check_prefill_and_decode(same.load("llama", tmp_path), theirs, length=length)


def test_greedy_answers_are_those_of_transformers(tmp_path):
    """A hundred prompts in a vocabulary of letters and bytes, with a BOS."""
    tokenizer = hub_folder.byte_fallback_tokenizer()
    eos = tokenizer.token_to_id(hub_folder.EOS)
    theirs = hub_folder.write(
        tmp_path, config(rope_parameters=same.LLAMA3, eos_token_id=eos), tokenizer=tokenizer
    )
    same.check_greedy("llama", tmp_path, theirs, count=50, eos=eos)


def test_neither_batch_nor_depth_changes_an_answer(tmp_path):
    """With grouped queries and RMS norms, a row has the same bits in any batch."""
    hub_folder.write(tmp_path, config(num_attention_heads=16), chat=hub_folder.CHAT)
    asked = same.questions(9, seed=4)
    with same.Engine("llama", tmp_path) as engine:
        sampling = {"max_tokens": 10, "temperature": 1.0}
        first = engine.ask(asked, **sampling).tokens
        assert engine.ask(asked, depth=1, **sampling).tokens == first
        assert engine.ask(asked, together=False, **sampling).tokens == first


def test_a_tied_head_may_be_there_twice(tmp_path):
    """A stored copy of a tied head must have the same values."""
    theirs = hub_folder.write(tmp_path, config(tie_word_embeddings=True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    same.check_prefill_and_decode(same.load("llama", tmp_path), theirs, length=9)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, path)
    with pytest.raises(InvalidField, match=r"lm_head\.weight differs"):
        same.load("llama", tmp_path)


def test_a_tied_model_is_counted_once(tmp_path):
    """The number of parameters is transformers'."""
    theirs = hub_folder.write(tmp_path, config(tie_word_embeddings=True))
    assert same.load("llama", tmp_path).num_parameters == theirs.num_parameters()


def test_bfloat16_follows_float32(tmp_path):
    """The same weights in half the bits give nearly the same logits."""
    hub_folder.write(tmp_path, config())
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = same.load("llama", tmp_path, dtype)
        prompt = list(map(PromptToken, range(3, 40)))
        logits.append(model.logits(PagedSession(model).prefill(0, None, prompt)))
    assert same.relative_error(logits[1], logits[0]) < 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is implemented"),
        ({"mlp_bias": True}, "mlp_bias is True; only False is implemented"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type is 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; only 1.0 is implemented",
        ),
    ],
)
def test_fields_that_are_not_implemented_are_named(tmp_path, fields, message):
    """Fields that would change answers and are not implemented are refused at load."""
    hub_folder.write(tmp_path, config())
    hub_folder.change(tmp_path / "config.json", **fields)
    with pytest.raises(InvalidField) as caught:
        resolve("llama", weights=str(tmp_path))
    assert message in caught.value.message


PHI_KINDS: dict[str, dict[str, Any]] = {
    "as Phi 1.5": {},
    "as Phi 2": {
        "hidden_size": 80,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.4,
        },
    },
    "grouped": {"num_key_value_heads": 2},
    "one head of keys": {"num_key_value_heads": 1, "layer_norm_eps": 1e-3},
}


@pytest.mark.parametrize("kind", PHI_KINDS)
@pytest.mark.parametrize("length", [1, 16, 45])
def test_logits_of_phi_are_those_of_transformers(tmp_path, kind, length):
    """Prefill and decode, within a page and across pages."""
    theirs = hub_folder.write(tmp_path, hub_folder.phi(**PHI_KINDS[kind]))
    same.check_prefill_and_decode(same.load("phi", tmp_path), theirs, length=length)


def test_far_positions_are_those_of_transformers(tmp_path):
    """The rotation is exact at the end of Phi's context, too."""
    theirs = hub_folder.write(
        tmp_path, hub_folder.phi(max_position_embeddings=2048, num_hidden_layers=1)
    )
    same.check_prefill_and_decode(same.load("phi", tmp_path), theirs, length=2020)


def test_a_prompt_in_two_spans_is_the_same_prompt(tmp_path):
    """The second span reads the first through its pages, wherever the prompt is cut."""
    theirs = hub_folder.write(tmp_path, hub_folder.phi(num_key_value_heads=2))
    for cut in (1, 16, 37):
        same.check_two_spans(same.load("phi", tmp_path), theirs, length=45, cut=cut)


def test_greedy_answers_of_phi_are_those_of_transformers(tmp_path):
    """Two hundred prompts, decoded sixteen at a time."""
    theirs = hub_folder.write(tmp_path, hub_folder.phi(num_key_value_heads=2))
    same.check_greedy("phi", tmp_path, theirs, count=50)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "gelu"), ("qk_layernorm", True), ("tie_word_embeddings", True)],
)
def test_fields_of_phi_that_are_not_implemented_are_named(tmp_path, field, value):
    """Fields that would change answers and are not implemented are refused at load."""
    hub_folder.write(tmp_path, hub_folder.phi())
    hub_folder.change(tmp_path / "config.json", **{field: value})
    with pytest.raises(InvalidField, match=f"{field} is {value!r}"):
        resolve("phi", weights=str(tmp_path))


VERSIONS = ("qwen2", "qwen3")


def qwen_config(kind, **fields):
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


QWEN_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as Qwen 2.5": ("qwen2", {}),
    "as Qwen 2.5 0.5B": ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 12}),
    "as Qwen 3": ("qwen3", {}),
    "as Qwen 3 0.6B": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
}


@pytest.mark.parametrize("kind", QWEN_KINDS)
@pytest.mark.parametrize("length", [1, 45])
def test_logits_of_qwen_are_those_of_transformers(tmp_path, kind, length):
    """Prefill and decode, within a page and across pages."""
    version, fields = QWEN_KINDS[kind]
    theirs = hub_folder.write(tmp_path, qwen_config(version, **fields))
    same.check_prefill_and_decode(same.load("qwen", tmp_path), theirs, length=length)


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_answers_of_qwen_are_those_of_transformers(tmp_path, version):
    """A hundred prompts each, in the turns of a chat."""
    theirs = hub_folder.write(tmp_path, qwen_config(version), chat=hub_folder.CHAT)
    same.check_greedy("qwen", tmp_path, theirs, count=50)


@pytest.mark.parametrize("version", VERSIONS)
def test_neither_batch_nor_depth_changes_an_answer_of_qwen(tmp_path, version):
    """With normed heads, a row has the same bits in any batch."""
    hub_folder.write(tmp_path, qwen_config(version))
    asked = same.questions(9, seed=5)
    with same.Engine("qwen", tmp_path) as engine:
        sampling = {"max_tokens": 10, "temperature": 1.0}
        first = engine.ask(asked, **sampling).tokens
        assert engine.ask(asked, depth=1, **sampling).tokens == first
        assert engine.ask(asked, together=False, **sampling).tokens == first


def test_thinking_is_switched_off(tmp_path):
    """Templates with a thinking switch have it off."""
    thinks = "{{ messages[0]['content'] }}{% if enable_thinking is false %} at once{% endif %}"
    hub_folder.write(tmp_path, qwen_config("qwen3"), chat=thinks)
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
def test_fields_of_qwen_that_are_not_implemented_are_named(tmp_path, version, fields, message):
    """Fields that would change answers and are not implemented are refused at load."""
    hub_folder.write(tmp_path, qwen_config(version))
    hub_folder.change(tmp_path / "config.json", **fields)
    with pytest.raises(InvalidField) as caught:
        resolve("qwen", weights=str(tmp_path))
    assert message in caught.value.message
