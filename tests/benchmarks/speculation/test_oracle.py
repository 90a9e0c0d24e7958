"""The oracle proposer has the quality that it is given, and recognises its rows."""

from statistics import fmean

import pytest
import torch
from legato_engine.speculative.proposer import UNKNOWN
from legato_engine.types import PromptToken

from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.run import interval
from tests.engine.speculative.histories import row_history

CPU = torch.device("cpu")
PROMPT = (PromptToken(3), PromptToken(4))


def test_a_history_is_prefix_prompt_and_tokens():
    """A history is laid out as on the device: nothing for the prefix, then ids by position."""
    assert known_history(3, PROMPT, [8, 9]) == [UNKNOWN, UNKNOWN, UNKNOWN, 3, 4, 8, 9]


def test_rows_are_recognised_by_what_they_hold():
    """A row goes on as the history that begins like it, or not at all."""
    known = [known_history(1, PROMPT, [5, 6, 7]), known_history(1, PROMPT, [5, 8, 9, 10])]
    proposer = OracleProposer(known, CPU, rates=[1.0], vocab_size=100)
    tokens_RC = torch.tensor(
        [
            [UNKNOWN, 3, 4, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
            [UNKNOWN, 3, 4, 5, 8, UNKNOWN, UNKNOWN, UNKNOWN],
            [UNKNOWN, 3, 4, 6, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
        ]
    )
    draft_RK = torch.zeros(3, 3, dtype=torch.int64)
    proposer.propose(row_history(tokens_RC, torch.tensor([3, 4, 3])), draft_RK)
    assert draft_RK.tolist() == [[6, 7, UNKNOWN], [9, 10, UNKNOWN], [UNKNOWN] * 3]


def verifies(proposer, known, block):
    """Return tokens accepted, tokens tried and verifies.

    Every verify proposes as many as there are left, up to `block`.
    """
    accepted = tried = count = 0
    for tokens, said in zip(known, proposer.tables[1].tolist(), strict=False):
        newest = len(PROMPT)
        while newest + 1 < len(tokens):
            places = range(newest + 1, min(newest + 1 + block, len(tokens)))
            stood = (*(said[at] == tokens[at] for at in places), False).index(False)
            accepted, tried = accepted + stood, tried + stood + (stood < len(places))
            newest, count = newest + stood + 1, count + 1
    return accepted, tried, count


def answers(count, length):
    """So many known histories that begin differently."""
    return [[1000 + nth, *known_history(0, PROMPT, [7] * length)[1:]] for nth in range(count)]


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_tokens_that_are_tried_are_right_as_often_as_asked(rate, block):
    """Of the tokens tried, up to the first wrong one, the share accepted is the rate.

    It depends neither on the block size nor on the position after a wrong token.
    """
    known = answers(1, 6000)
    proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000)
    accepted, tried, _ = verifies(proposer, known, block)
    low, high = interval(accepted, tried)
    assert tried > 2500
    assert low < rate < high
    assert high - low < 0.05


@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_twenty_answers_are_a_sample_of_the_rate(rate, block):
    """On average over samples of twenty short answers the accepted fraction is the rate.

    In all but one sample of twenty it is the rate within 0.01.
    """
    known = answers(20, 110)
    shares = []
    for seed in range(8):
        proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000, seed=seed)
        accepted, tried, _ = verifies(proposer, known, block)
        shares.append(accepted / tried)
    assert fmean((share - rate) ** 2 for share in shares) < 0.007**2
    assert fmean(shares) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_a_verify_commits_what_theory_says(rate, block):
    """A block of g at a rate of a gives `(1 - a ** (g + 1)) / (1 - a)` tokens a verify.

    Luck that is shared evenly changes no expectation.
    """
    known = answers(20, 2000)
    proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000)
    accepted, _, count = verifies(proposer, known, block)
    theory = (1 - rate ** (block + 1)) / (1 - rate)
    assert (accepted + count) / count == pytest.approx(theory, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8, 1.0])
def test_tokens_are_right_as_often_as_asked(rate):
    """Over many places the share of right tokens is the rate, whatever block asks for them."""
    known = known_history(0, PROMPT, list(range(2000)))
    proposer = OracleProposer([known], CPU, rates=[rate], vocab_size=2000)
    tokens_RC = torch.tensor([known])
    said: dict[int, set[int]] = {}
    for newest in range(2, len(known) - 8, 3):
        draft_RK = torch.zeros(1, 8, dtype=torch.int64)
        row_RC = tokens_RC.clone()
        row_RC[:, newest + 1 :] = UNKNOWN
        proposer.propose(row_history(row_RC, torch.tensor([newest])), draft_RK)
        for place, token in enumerate(draft_RK[0].tolist(), start=newest + 1):
            said.setdefault(place, set()).add(token)
    assert all(len(tokens) == 1 for tokens in said.values()), "a place is said in two ways"
    right = sum(known[place] in tokens for place, tokens in said.items()) / len(said)
    assert right == pytest.approx(rate, abs=0.03)


def test_a_rate_may_change_with_the_position():
    """The last one given holds for the rest."""
    known = [answers(1, 1000)[0], answers(1, 1000)[0]]
    rates: list[float | list[float]] = [[1.0] * 100 + [0.0] * 200 + [0.5], 1.0]
    proposer = OracleProposer(known, CPU, rates=rates, vocab_size=2000)
    (first, second), tokens = proposer.tables[1][:2].tolist(), known[0]
    assert first[1:100] == tokens[1:100]
    assert not any(
        said == token for said, token in zip(first[100:300], tokens[100:300], strict=True)
    )
    late = [said == token for said, token in zip(first[300:1000], tokens[300:1000], strict=True)]
    assert fmean(late) == pytest.approx(0.5, abs=0.05)
    assert second[1:1000] == tokens[1:1000]


def test_sequences_share_luck_evenly():
    """At each place the fraction of right tokens is the rate, give or take one sequence.

    Whether a token is right says nothing of the next one of its sequence.
    """
    proposer = OracleProposer(answers(24, 500), CPU, rates=[0.4], vocab_size=2000)
    known_NC, said_NC = (table[:-1, :502].clone() for table in proposer.tables)
    right_NC = (known_NC == said_NC)[:, len(PROMPT) :].double()
    counts_C = right_NC.sum(0)
    assert set(counts_C.tolist()) == {9.0, 10.0}
    assert right_NC.mean().item() == pytest.approx(0.4, abs=0.003)
    centred_NC = right_NC - 0.4
    together = (centred_NC[:, 1:] * centred_NC[:, :-1]).mean().item()
    assert together == pytest.approx(0.0, abs=0.01)
    assert right_NC.mean(1).std().item() > 0.015


def test_another_run_can_be_known():
    """What it knows is exchanged in place; of those before nothing is left."""
    first, second = known_history(0, PROMPT, [5, 6, 7, 8]), known_history(0, PROMPT, [5, 9])
    proposer = OracleProposer([first], CPU, rates=[1.0], vocab_size=100, capacity=(2, 8))
    tokens_RC = torch.tensor([[3, 4, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]])
    said = []
    for known in ([first], [second], [second, first]):
        proposer.know(known, rates=[1.0])
        draft_RK = torch.zeros(1, 3, dtype=torch.int64)
        proposer.propose(row_history(tokens_RC, torch.tensor([2])), draft_RK)
        said.append(draft_RK[0].tolist())
    assert said == [[6, 7, 8], [9, UNKNOWN, UNKNOWN], [9, UNKNOWN, UNKNOWN]]
