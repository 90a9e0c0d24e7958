"""The choice of an engine."""

import collections
import random

import pytest
from legato_service.engines.group import MAX_LEAD, Candidate, choose

RECOMPUTING = 0.1  # seconds


def chosen(*candidates, turn=0):
    return choose(candidates, turn, RECOMPUTING)


@pytest.mark.parametrize("turn", range(3))
def test_the_shortest_wait_is_chosen(turn):
    """Whichever turn it is, by the predicted wait and what it has not seen yet."""
    assert chosen(Candidate(0, wait=0.3), Candidate(1, wait=0.2), turn=turn) == 1
    assert chosen(Candidate(0, load=1.0), Candidate(1, load=0.5), turn=turn) == 1
    assert chosen(Candidate(0, 0.1, 1.0), Candidate(1, 0.9, 0.1), turn=turn) == 1


def test_equal_engines_take_turns():
    """Idle engines get as many requests, by number whatever the order of the candidates."""
    idle = (Candidate(0), Candidate(2), Candidate(5))
    assert collections.Counter(chosen(*idle, turn=turn) for turn in range(9)) == {0: 3, 2: 3, 5: 3}


def test_a_holder_is_preferred_while_its_lead_is_small():
    """Up to the time that the others would compute, and to a share of its rows."""
    idle = Candidate(0)
    assert chosen(idle, Candidate(1, wait=RECOMPUTING, holds=True)) == 1
    assert chosen(idle, Candidate(1, wait=RECOMPUTING + 0.01, holds=True)) == 0
    assert chosen(idle, Candidate(1, load=MAX_LEAD, holds=True)) == 1
    assert chosen(idle, Candidate(1, load=MAX_LEAD + 0.01, holds=True)) == 0


def test_of_several_holders_the_least_loaded_is_chosen():
    """An engine that holds nothing is not, though it has less to do."""
    busy, less, idle = Candidate(0, load=0.4, holds=True), Candidate(1, load=0.2, holds=True), 2
    assert chosen(busy, less, Candidate(idle)) == 1


def test_a_full_holder_is_passed_over():
    """Its queue would refuse what another one takes."""
    assert chosen(Candidate(0), Candidate(1, holds=True, is_full=True)) == 0


def test_one_hot_image_does_not_overload_its_holder():
    """Whatever is asked for, no engine's lead exceeds the bound and the request itself."""
    chance, rows = random.Random(7), 16
    open_requests = [0, 0, 0]
    for turn in range(3000):
        candidates = [
            Candidate(number, load=count / rows, holds=number == 0)
            for number, count in enumerate(open_requests)
        ]
        open_requests[choose(candidates, turn, RECOMPUTING)] += 1
        assert max(open_requests) - min(open_requests) <= MAX_LEAD * rows + 1
        if sum(open_requests) > 60:
            busy = [number for number, count in enumerate(open_requests) if count]
            open_requests[chance.choice(busy)] -= 1
            least = min(open_requests)
            open_requests = [min(count, least + 8) for count in open_requests]
