"""Acceptance, eviction order, pages and the cost table, each by itself."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.kv_cache.eviction import EvictionCandidate, eviction_order
from legato_engine.megakernel.descriptor import RequestDescriptor
from legato_engine.megakernel.models import LookupProposer
from legato_engine.megakernel.pages import PageState, PageTable
from legato_engine.speculative.acceptance import AcceptancePolicy
from legato_engine.speculative.costs import CostTable

TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, max_size=8), st.data())
def test_what_stands_is_the_longest_prefix_that_the_target_agrees_with(draft, data):
    """Up to there all are equal, and the next, if there is one, is not."""
    size = len(draft) + 1
    sampled = data.draw(st.lists(TOKENS, min_size=size, max_size=size))
    count = AcceptancePolicy().accepted_prefix(draft, sampled)
    assert draft[:count] == sampled[:count]
    assert count == len(draft) or draft[count] != sampled[count]


def test_the_target_adds_one_token_and_nothing_passes_a_stop_or_the_limit():
    """Accepted tokens and one more, cut where the request ends."""
    policy = AcceptancePolicy(stop_token=9)
    assert policy.committed((5, 6, 7), accepted=2, num_left=10) == (5, 6, 7)
    assert policy.committed((5, 6, 7), accepted=0, num_left=10) == (5,)
    assert policy.committed((5, 6, 7), accepted=2, num_left=2) == (5, 6)
    assert policy.committed((5, 9, 7), accepted=2, num_left=10) == (5, 9)


def test_eviction_order_is_priority_then_acceptance_then_age():
    """Whatever order the candidates come in."""
    order = [
        EvictionCandidate(3, priority=0, ema_acceptance_rate=0.2, last_used=9),
        EvictionCandidate(1, priority=0, ema_acceptance_rate=0.5, last_used=2),
        EvictionCandidate(2, priority=0, ema_acceptance_rate=0.5, last_used=4),
        EvictionCandidate(0, priority=1, ema_acceptance_rate=0.1, last_used=0),
    ]
    for shuffled in itertools.permutations(order):
        assert eviction_order(shuffled) == order


def test_a_borrowed_page_outlives_its_owner_and_is_copied_before_a_borrower_writes():
    """Reading is free, writing needs a page of one's own; the last holder may just write."""
    pages = PageTable(4, page_size=2)
    page = pages.allocate(0, PageState.COMMITTED)
    pages.write(0, [page], 0, 11)
    pages.borrow(1, page)
    pages.borrow(2, page)
    assert pages.claim(0, page)
    assert not pages.claim(1, page)
    own = pages.copy(1, page)
    pages.write(1, [own], 1, 22)
    assert [pages.read([own], 0), pages.read([own], 1)] == [11, 22]
    with pytest.raises(AssertionError, match="read before it is written"):
        pages.read([page], 1)
    pages.release(0, page)
    assert pages.num_free == 2
    assert pages.claim(2, page)
    with pytest.raises(AssertionError, match="writes page"):
        pages.write(1, [page], 1, 33)
    pages.release(2, page)
    pages.release(1, own)
    assert pages.num_free == 4


def test_fragmentation_counts_draft_pages_that_were_given_back():
    """Committed ones are no waste."""
    pages = PageTable(10, page_size=2)
    kept, lost = (pages.allocate(0, PageState.DRAFT) for _ in range(2))
    pages.commit(kept)
    pages.release(0, lost)
    report = pages.report()
    assert (report.free, report.draft, report.committed) == (9, 0, 1)
    assert report.fragmentation_ratio == 0.5


@pytest.mark.parametrize(("held", "pressed"), [(85, False), (86, True), (0, False)])
def test_pressure_begins_above_85_percent(held, pressed):
    """Of the pool's pages in use."""
    pages = PageTable(100, page_size=1)
    for _ in range(held):
        pages.allocate(0, PageState.COMMITTED)
    assert pages.is_under_pressure is pressed


def test_lookup_proposes_what_followed_the_latest_occurrence():
    """The newest of several, no more than is known, nothing for what is new."""
    request = RequestDescriptor(0, prompt=(1, 2, 3, 1, 2, 4, 5, 1, 2), max_tokens=9)
    assert LookupProposer(2).propose(request, 2) == (4, 5)
    assert LookupProposer(2).propose(request, 9) == (4, 5, 1, 2)
    request.tokens.append(7)
    assert LookupProposer(2).propose(request, 2) == ()


def test_costs_are_linear_between_what_was_measured_and_beyond():
    """Flat below the first point."""
    costs = CostTable(steps=((8, 1.0), (16, 2.0), (32, 3.0)), prefill=0.0)
    assert [costs.step(n) for n in (0, 1, 8, 12, 16, 24, 32, 48)] == [0, 1, 1, 1.5, 2, 2.5, 3, 4]
