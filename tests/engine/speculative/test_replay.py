"""The proposer of known quality has that quality, and recognises whom it speaks for."""

import pytest
import torch
from legato_engine.core import PromptToken
from legato_engine.speculation_run import interval
from legato_engine.speculative.proposer import UNKNOWN
from legato_engine.speculative.replay import ReplayProposer, known_history

from tests.engine.speculative.histories import row_history

CPU = torch.device("cpu")
PROMPT = (PromptToken(3), PromptToken(4))


def test_a_history_is_prefix_prompt_and_tokens():
    """It stands where the device has it: nothing for the prefix, then ids by position."""
    assert known_history(3, PROMPT, [8, 9]) == [UNKNOWN, UNKNOWN, UNKNOWN, 3, 4, 8, 9]


def test_rows_are_recognised_by_what_they_hold():
    """A row goes on as the history that begins like it, or not at all."""
    known = [known_history(1, PROMPT, [5, 6, 7]), known_history(1, PROMPT, [5, 8, 9, 10])]
    proposer = ReplayProposer(known, CPU, rates=[1.0], vocab_size=100)
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


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_tokens_that_are_tried_are_right_as_often_as_asked(rate, block):
    """Of what a verify compares, up to the first wrong one, the share accepted is the rate: no
    block, and no place behind a wrong token, is luckier than another.
    """
    answer = [n % 97 for n in range(6000)]
    known = known_history(0, PROMPT, answer)
    proposer = ReplayProposer([known], CPU, rates=[rate], vocab_size=100)
    said = proposer.tables[1][0].tolist()
    newest, accepted, tried = len(PROMPT), 0, 0
    while newest + block < len(known):
        right = [said[at] == known[at] for at in range(newest + 1, newest + 1 + block)]
        stood = (*right, False).index(False)
        accepted, tried = accepted + stood, tried + stood + (stood < block)
        newest += stood + 1
    low, high = interval(accepted, tried)
    assert tried > 2500
    assert low < rate < high
    assert high - low < 0.05


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8, 1.0])
def test_tokens_are_right_as_often_as_asked(rate):
    """Over many places the share of right tokens is the rate, whatever block asks for them."""
    known = known_history(0, PROMPT, list(range(2000)))
    proposer = ReplayProposer([known], CPU, rates=[rate], vocab_size=2000)
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


def test_sequences_share_luck_evenly():
    """Of a place, so many of them are right as the rate says, give or take one; and whether a token
    is right says nothing of the next one of its sequence.
    """
    answers = [known_history(0, PROMPT, [7] * 500) for _ in range(24)]
    for each, first in zip(answers, range(24), strict=True):
        each[0] = 10 + first
    proposer = ReplayProposer(answers, CPU, rates=[0.4], vocab_size=100)
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
    proposer = ReplayProposer([first], CPU, rates=[1.0], vocab_size=100, room=(2, 8))
    tokens_RC = torch.tensor([[3, 4, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]])
    said = []
    for known in ([first], [second], [second, first]):
        proposer.know(known, rates=[1.0])
        draft_RK = torch.zeros(1, 3, dtype=torch.int64)
        proposer.propose(row_history(tokens_RC, torch.tensor([2])), draft_RK)
        said.append(draft_RK[0].tolist())
    assert said == [[6, 7, 8], [9, UNKNOWN, UNKNOWN], [9, UNKNOWN, UNKNOWN]]
