"""The seed's rule for block sizes, its arithmetic, and what it does to real acceptance."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.speculative.policy import AdaptiveBlockPolicy, update_block_size

from tests.engine.speculative.drafted import DraftingRun, Flag, RequestDescriptor

POLICY = AdaptiveBlockPolicy()


def fresh():
    """A request that has proposed nothing yet."""
    request = RequestDescriptor(0, max_tokens=100)
    POLICY.begin(request)
    return request


def test_ema_rises_on_sustained_acceptance():
    """Everything accepted: the average climbs towards 1 and the block is the largest."""
    request = fresh()
    averages = []
    for _ in range(30):
        update_block_size(POLICY, request, 4, 4)
        averages.append(request.ema_acceptance_rate)
    assert averages == sorted(averages)
    assert averages[0] > np.float32(0.8)
    assert averages[-1] > 0.99
    assert request.current_block_size == POLICY.max_block


def test_ema_falls_on_rejection_until_the_block_is_the_smallest():
    """Nothing accepted: first the middle size, then the least, and there it stays."""
    request = fresh()
    blocks = []
    for _ in range(10):
        update_block_size(POLICY, request, 0, request.current_block_size)
        blocks.append(request.current_block_size)
    assert blocks == sorted(blocks, reverse=True)
    assert set(blocks) == {POLICY.mid_block, POLICY.min_block}
    assert blocks[-1] == POLICY.min_block


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), min_size=1))
def test_the_pressure_cap_is_never_exceeded(steps):
    """Under pressure no block is above 2, and no block ever leaves the policy's sizes."""
    request = fresh()
    for accepted, more, pressed in steps:
        request.set_flag(Flag.KV_PRESSURE, on=pressed)
        update_block_size(POLICY, request, accepted, accepted + more)
        block = request.current_block_size
        assert block <= 2 if pressed else block in (1, 4, 8)
        assert 0.0 <= request.ema_acceptance_rate <= 1.0


def test_one_rejection_after_ten_acceptances_does_not_collapse_the_block():
    """The average absorbs the shock: it loses a fifth, and the block no more than one size."""
    request = fresh()
    for _ in range(10):
        update_block_size(POLICY, request, 8, 8)
    before = request.ema_acceptance_rate
    update_block_size(POLICY, request, 0, 8)
    assert request.ema_acceptance_rate == pytest.approx(0.8 * before)
    assert request.current_block_size == POLICY.mid_block
    update_block_size(POLICY, request, 4, 4)
    assert request.current_block_size == POLICY.max_block


def test_nothing_proposed_counts_as_nothing_accepted():
    """The seed's r is 0 then."""
    request = fresh()
    update_block_size(POLICY, request, 0, 0)
    assert request.ema_acceptance_rate == pytest.approx(0.64)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=60))
def test_arithmetic_is_float32_to_the_bit(steps):
    """Every average is what float32 hardware gives, operation by operation, without fusing."""
    request = fresh()
    alpha, one = np.float32(0.2), np.float32(1)
    average = np.float32(0.8)
    for accepted, more in steps:
        proposed = accepted + more
        rate = np.float32(accepted) / np.float32(proposed) if proposed else np.float32(0)
        average = alpha * rate + (one - alpha) * average
        update_block_size(POLICY, request, accepted, proposed)
        assert np.float32(request.ema_acceptance_rate).tobytes() == average.tobytes()
        assert request.ema_acceptance_rate == float(average)


def test_a_request_that_comes_back_keeps_what_it_learnt():
    """Only the very first block is the launch's."""
    request = fresh()
    assert request.current_block_size == POLICY.first_block
    request.block_size_history.append(4)
    for _ in range(9):
        update_block_size(POLICY, request, 0, 4)
    POLICY.begin(request)
    assert request.current_block_size == POLICY.min_block


def mean_block(rate, policy, length=600):
    """The mean block of a long request whose tokens are each accepted with `rate`."""
    request = RequestDescriptor(0, max_tokens=length)
    DraftingRun([request], [rate], policy).run()
    return statistics.fmean(request.block_size_history[20:-2])  # the last are cut short


def test_a_high_and_a_low_acceptance_converge_to_the_largest_and_the_smallest_block():
    """The seed's table: certain drafts go to 8, hopeless ones to 1."""
    assert mean_block(1.0, POLICY) == 8
    assert mean_block(0.0, POLICY) == 1


def test_the_share_accepted_depends_on_the_block_that_it_steers():
    """What the seed's rule measures falls as the block grows, so at 0.8 a token it never settles.

    A block of 8 is accepted for 0.42 of its length and sends the rule to 1, where the share is 0.8
    and sends it up again: every size is seen again and again.
    """
    request = RequestDescriptor(0, max_tokens=3000)
    DraftingRun([request], [0.8]).run()
    settled = request.block_size_history[50:-8]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert set(settled) == {1, 4, 8} or set(settled) == {1, 4}
    assert changes > len(settled) / 20
