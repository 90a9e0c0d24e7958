"""Six conversations with SmolLM2, token for token as transformers answers them."""

from __future__ import annotations

from tests.published.engine import engine, prompt, tokens
from tests.published.reference import PROMPTS

_CHOSEN = (0, 5, 7, 18, 23, 28)  # words, code, digits, JSON, a special token's text, several turns
_TOKENS = 12


def test_answers_are_those_of_transformers(weights, recorded):
    """Dequantised weights, tokenizer and chat template of the published file."""
    talks = [PROMPTS[at] for at in _CHOSEN]
    with engine(weights) as running:
        for at, talk in zip(_CHOSEN, talks, strict=True):
            assert prompt(running, talk) == recorded[at]["prompt"], talk
        found = tokens(running, talks, _TOKENS)
    assert found == [recorded[at]["tokens"][:_TOKENS] for at in _CHOSEN]
