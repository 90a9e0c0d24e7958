"""Prompt lookup on the device says what its definition says, for all rows at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.speculative.proposer import UNKNOWN, LookupProposer

from tests.engine.speculative.histories import row_history

LENGTH, BLOCK = 24, 5


def looked_up(tokens, *, shortest, longest):
    """The definition, for one row: `tokens` up to the newest, unknown ones included."""
    best = (0, -1)
    for end in range(len(tokens) - 1):
        agreed = 0
        while agreed < longest and end - agreed >= 0:
            here, tail = tokens[end - agreed], tokens[len(tokens) - 1 - agreed]
            if here != tail or here == UNKNOWN:
                break
            agreed += 1
        if agreed >= shortest:
            best = max(best, (agreed, end))
    if best[1] < 0:
        return [UNKNOWN] * BLOCK
    period = len(tokens) - 1 - best[1]
    return [tokens[best[1] + 1 + step % period] for step in range(BLOCK)]


def proposals(rows, **orders):
    """What the proposer says for each of some rows of tokens."""
    tokens_RC = torch.full((len(rows), LENGTH), UNKNOWN)
    for tokens_C, row in zip(tokens_RC, rows, strict=True):
        tokens_C[: len(row)] = torch.tensor(row)
    history = row_history(tokens_RC, torch.tensor([len(row) - 1 for row in rows]))
    draft_RK = torch.full((len(rows), BLOCK), 77)
    LookupProposer(**orders).propose(history, draft_RK)
    return draft_RK.tolist()


def test_the_latest_place_with_most_words_in_common_is_continued():
    """Three words in common go before two, and of equals the later one is taken."""
    row = [1, 2, 3, 40, 9, 2, 3, 50, 8, 2, 3, 60, 1, 2, 3]
    (guess,) = proposals([row], shortest=2, longest=3)
    assert guess == [40, 9, 2, 3, 50]
    (guess,) = proposals([row], shortest=1, longest=2)
    assert guess == [60, 1, 2, 3, 60]


def test_what_runs_into_the_end_repeats():
    """A text that repeats is proposed to go on repeating, for a whole block."""
    assert proposals([[7, 1, 2, 1, 2], [4, 4, 4]], shortest=2, longest=4) == [
        [1, 2, 1, 2, 1],
        [4, 4, 4, 4, 4],
    ]


def test_nothing_is_found_in_what_is_unknown():
    """The picture's positions agree with nothing, and a row of nothing gets no proposal."""
    picture = [UNKNOWN] * 6
    assert (
        proposals([[*picture, 5, 6, 7], picture, [3]], shortest=1, longest=3)
        == [[UNKNOWN] * BLOCK] * 3
    )


tokens = st.lists(st.sampled_from([UNKNOWN, 1, 2, 3]), min_size=1, max_size=LENGTH)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(tokens, min_size=1, max_size=4), shortest=st.integers(1, 3))
def test_every_row_follows_the_definition(rows, shortest):
    """Whatever stands in the rows, each gets what it would get alone and slowly."""
    expected = [looked_up(row, shortest=shortest, longest=3) for row in rows]
    assert proposals(rows, shortest=shortest, longest=3) == expected
