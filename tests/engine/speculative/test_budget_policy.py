"""Giving out proposals over a batch: the estimate, the tiers, what it wins over the seed."""

import pytest
from legato_engine.speculative.policy import (
    AdaptiveBlockPolicy,
    CostTable,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from tests.engine.speculative.drafted import H200_MOONDREAM2, DraftingRun, Flag, RequestDescriptor


def budget():
    """A policy without any counts."""
    return TokenBudgetPolicy(H200_MOONDREAM2)


def running(count, policy):
    """Requests that are about to propose."""
    requests = [RequestDescriptor(i, max_tokens=500) for i in range(count)]
    for request in requests:
        policy.begin(request)
    return requests


def speed(policy, num_streams, *shares):
    """Tokens a virtual second while all streams run."""
    requests = [RequestDescriptor(i, max_tokens=300) for i in range(num_streams)]
    run = DraftingRun(requests, shares, policy)
    while len(run.active()) == num_streams:
        run.step()
    return sum(request.num_generated for request in requests) / run.now


@pytest.mark.parametrize(
    "block", [*(pytest.param(block, marks=pytest.mark.slow) for block in (1, 8)), 4]
)
def test_the_estimate_does_not_depend_on_the_block(block):
    """Tokens right with probability 0.6 are estimated at 0.6, however many are proposed at once."""
    learner = TokenBudgetPolicy(H200_MOONDREAM2, decay=0.999)

    class Learning(FixedBlockPolicy):
        def update(self, request, accepted, proposed):
            learner.update(request, accepted, proposed)

    (request,) = running(1, learner)
    request.max_tokens = 4000
    DraftingRun([request], [0.6], Learning(block)).run()
    assert request.ema_acceptance_rate == pytest.approx(0.6, abs=0.06)


def test_tokens_that_cost_nothing_are_always_proposed():
    """Up to 8 positions a forward costs the same: a lone stream proposes 7 or more."""
    policy = budget()
    (request,) = running(1, policy)
    request.accepted_weight = 0.1 * request.tried_weight
    policy.allot([request])
    assert request.current_block_size >= 7


def test_who_is_likelier_proposes_more():
    """Within one batch, and never above the cap under pressure."""
    policy = budget()
    requests = running(4, policy)
    for request, rate in zip(requests, (0.95, 0.8, 0.5, 0.05), strict=True):
        request.accepted_weight = rate * request.tried_weight
    policy.allot(requests)
    blocks = [request.current_block_size for request in requests]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > blocks[-1]
    for request in requests:
        request.set_flag(Flag.KV_PRESSURE, on=True)
    policy.allot(requests)
    assert max(request.current_block_size for request in requests) <= policy.pressure_block


def test_a_new_request_is_believed_to_do_as_the_others():
    """New requests start from the rate that earlier requests have shown."""
    policy = budget()
    (first,) = running(1, policy)
    assert first.accepted_weight / first.tried_weight == pytest.approx(0.8)
    for _ in range(300):
        policy.update(first, 1, 3)  # of 2 tried
    (second,) = running(1, policy)
    assert second.tried_weight == policy.prior_weight
    assert second.accepted_weight / second.tried_weight == pytest.approx(0.5, abs=0.02)


def test_a_draft_is_paid_by_the_longest_block():
    """It speaks for all rows at once: what one proposes, the others propose for nothing more."""
    costs = CostTable(steps=((1, 1.0), (64, 1.0)), prefill=0.0, propose=0.2)
    policy = TokenBudgetPolicy(costs)
    alone, *others = running(9, policy)
    policy.allot([alone])
    by_itself = alone.current_block_size
    policy.allot([alone, *others])
    sizes = {each.current_block_size for each in (alone, *others)}
    assert sizes == {by_itself}
    assert 0 < by_itself < policy.max_block


def test_a_longer_step_has_to_be_worth_it():
    """A longer step is proposed only if its expected tokens outweigh its cost.

    Seven tokens bring a quarter of a hundredth more than three at a rate of 0.49, and nearly two at
    0.52; the step is 5.5 % longer. Where it is as long, everything is proposed.
    """
    costs = CostTable(((1, 0.791), (4, 0.871), (5, 0.919), (8, 0.919)), prefill=0.0)
    policy = TokenBudgetPolicy(costs, max_block=7)
    (request,) = running(1, policy)
    blocks = []
    for rate in (0.49, 0.52):
        request.accepted_weight = rate * request.tried_weight
        policy.allot([request])
        blocks.append(request.current_block_size)
    assert blocks == [3, 7]


def test_tier_0_proposes_nothing_and_looks_again_after_32_steps():
    """Where every token costs, a hopeless draft is given up, and tried again once in a while."""
    dear = TokenBudgetPolicy(CostTable(steps=((1, 1.0), (2, 2.0)), prefill=0.0))
    (request,) = running(1, dear)
    request.accepted_weight = 0.0
    sizes = []
    for _ in range(80):
        dear.allot([request])
        sizes.append(request.current_block_size)
        request.block_size_history.append(request.current_block_size)
    assert set(sizes) == {0, 1}
    probes = [step for step, size in enumerate(sizes) if size]
    assert probes == [32, 65]


@pytest.mark.parametrize("num_streams", [1, 8, 32])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_it_is_no_slower_than_the_seeds_rule_on_streams_alike(num_streams, share):
    """By more than the hundredth that its learning costs."""
    ours, seeds = (
        speed(policy, num_streams, share) for policy in (budget(), AdaptiveBlockPolicy())
    )
    assert ours > 0.985 * seeds


@pytest.mark.parametrize("num_streams", [8, 32])
def test_it_is_faster_on_streams_that_differ(num_streams):
    """Than the seed's rule and than every fixed block."""
    shares = (0.95, 0.1, 0.6, 0.8)
    ours = speed(budget(), num_streams, *shares)
    others = [AdaptiveBlockPolicy(), *map(FixedBlockPolicy, (0, 1, 2, 4, 8))]
    best = max(speed(policy, num_streams, *shares) for policy in others)
    assert ours > 1.04 * best
