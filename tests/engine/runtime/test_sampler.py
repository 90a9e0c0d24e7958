"""Sampling follows its definition, and rows do not depend on their batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.runtime.sampler import constraint_table, greedy, gumbel_noise, sample
from legato_engine.sequence import Constraint


def rows(count: int, **values: float) -> dict[str, torch.Tensor]:
    """Sampling tensors of `count` equal rows, seeds and positions counting up."""
    return {
        "temperature_B": torch.full((count,), values.get("temperature", 1.0)),
        "top_p_B": torch.full((count,), values.get("top_p", 1.0)),
        "top_k_B": torch.full((count,), int(values.get("top_k", 0))),
        "seed_B": torch.full((count,), int(values.get("seed", 1))),
        "position_B": torch.arange(count),
    }


def test_constraints_allow_and_suppress() -> None:
    """A constraint leaves exactly its allowed tokens, less its suppressed ones."""
    table_CV = constraint_table([Constraint(), Constraint((1, 3)), Constraint(None, (0,))], 4)
    allowed = torch.isfinite(table_CV).tolist()
    assert allowed == [[True] * 4, [False, True, False, True], [False, True, True, True]]


def test_zero_temperature_is_greedy() -> None:
    """A row at temperature 0 takes the highest logit, next to a sampled row too."""
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    parameters = rows(6)
    parameters["temperature_B"][::2] = 0.0
    chosen = sample(logits_BV, **parameters)
    assert torch.equal(chosen[::2], greedy(logits_BV)[::2])


def test_top_p_keeps_the_token_that_crosses() -> None:
    """A token stays while the mass before it is at most top_p; the first always stays."""
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    count = 4000
    for top_p, kept in [(0.3, {0}), (0.55, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})]:
        chosen = sample(logits_V.repeat(count, 1), **rows(count, top_p=top_p))
        assert set(chosen.tolist()) == kept, top_p


def test_top_k_keeps_the_k_most_likely() -> None:
    """With top_k 2 only the two highest are drawn, and both are."""
    chosen = sample(torch.tensor([[0.0, 1.0, 0.5, -1.0]]).repeat(2000, 1), **rows(2000, top_k=2))
    assert set(chosen.tolist()) == {1, 2}


def test_draws_follow_the_distribution() -> None:
    """Over many positions the frequencies are the softmax probabilities within four sigma."""
    probs_V = torch.tensor([0.6, 0.25, 0.1, 0.05])
    count = 40_000
    chosen = sample(probs_V.log().repeat(count, 1), **rows(count))
    freq_V = torch.bincount(chosen, minlength=4) / count
    sigma_V = (probs_V * (1 - probs_V) / count).sqrt()
    assert ((freq_V - probs_V).abs() < 4 * sigma_V).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), permutation=st.permutations(range(8)))
def test_a_row_does_not_see_its_neighbours(seed: int, permutation: list[int]) -> None:
    """A permuted batch has permuted tokens."""
    logits_BV = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed % 1000))
    parameters = rows(8, top_p=0.9, temperature=0.7)
    parameters["seed_B"] = torch.full((8,), seed)
    chosen = sample(logits_BV, **parameters)
    order = torch.tensor(permutation)
    shuffled = sample(logits_BV[order], **{k: v[order] for k, v in parameters.items()})
    assert torch.equal(chosen[order], shuffled)


@pytest.mark.parametrize("changed", ["seed_B", "position_B"])
def test_noise_depends_on_seed_and_position(changed: str) -> None:
    """Another seed or another position draws other noise; the same pair draws the same."""
    key = {"seed_B": torch.tensor([5]), "position_B": torch.tensor([9])}
    tokens = torch.arange(16)[None]
    same = gumbel_noise(**key, token_BV=tokens)
    assert torch.equal(same, gumbel_noise(**key, token_BV=tokens))
    key[changed] = key[changed] + 1
    assert not torch.equal(same, gumbel_noise(**key, token_BV=tokens))
