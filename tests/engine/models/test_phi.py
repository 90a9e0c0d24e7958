"""Phi as transformers computes it, and configurations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.registry import resolve

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder

KINDS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 16, 45])
def test_logits_are_those_of_transformers(tmp_path, kind, length):
    """Prefill and decode, within a page and across pages."""
    theirs = hub_folder.write(tmp_path, hub_folder.phi(**KINDS[kind]))
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


def test_greedy_answers_are_those_of_transformers(tmp_path):
    """Two hundred prompts, decoded sixteen at a time."""
    theirs = hub_folder.write(tmp_path, hub_folder.phi(num_key_value_heads=2))
    same.check_greedy("phi", tmp_path, theirs, count=200)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "gelu"), ("qk_layernorm", True), ("tie_word_embeddings", True)],
)
def test_fields_that_are_not_implemented_are_named(tmp_path, field, value):
    """Fields that would change answers and are not implemented are refused at load."""
    hub_folder.write(tmp_path, hub_folder.phi())
    hub_folder.change(tmp_path / "config.json", **{field: value})
    with pytest.raises(InvalidField, match=f"{field} is {value!r}"):
        resolve("phi", weights=str(tmp_path))
