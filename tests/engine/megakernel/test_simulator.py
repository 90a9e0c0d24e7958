"""Whole launches: outputs, pages, grafts, priorities and the virtual clock."""

import random

import pytest
from legato_engine.megakernel.descriptor import RequestDescriptor, State
from legato_engine.megakernel.models import LookupProposer
from legato_engine.speculative.block_policy import AdaptiveBlockPolicy, FixedBlockPolicy
from legato_engine.speculative.budget_policy import TokenBudgetPolicy
from legato_engine.speculative.costs import H200_MOONDREAM2

from tests.engine.megakernel.world import check_pages, expected, make, random_requests, rates

SCHEDULES = 10_000
POLICIES = (
    FixedBlockPolicy(0),
    FixedBlockPolicy(1),
    FixedBlockPolicy(4),
    FixedBlockPolicy(8),
    AdaptiveBlockPolicy(),
    TokenBudgetPolicy(H200_MOONDREAM2),
)


def run_checked(simulator):
    """Run to the end with every page accounted for after each iteration."""
    while not simulator.machine.done:
        simulator.step()
        check_pages(simulator.machine)


def random_schedule(seed):
    """A random batch on a pool that is often too small, with a random policy and proposer."""
    draw = random.Random(seed)
    requests = random_requests(draw)
    page_size = draw.choice((1, 2, 4))
    longest = max(len(each.prompt) + each.max_tokens for each in requests)
    enough = -(-longest // page_size) + 1
    simulator = make(
        requests,
        num_pages=enough + draw.randrange(0, 2 * enough),
        page_size=page_size,
        policy=draw.choice(POLICIES),
        proposer=draw.choice((rates(0.9, 0.3), rates(0.0), rates(1.0), LookupProposer(1))),
        max_running=draw.randrange(1, 6),
    )
    return simulator, requests


def first_soon(numbers, count):
    """The first `count` where tests end soon."""
    return [
        number if number < count else pytest.param(number, marks=pytest.mark.slow)
        for number in numbers
    ]


@pytest.mark.parametrize("part", first_soon(range(10), 1))
def test_no_schedule_changes_what_is_generated(part):
    """Speculation, batch, preemption, grafts: each request says what it says alone."""
    size = SCHEDULES // 10
    preempted = grafted = 0
    for seed in range(part * size, (part + 1) * size):
        simulator, requests = random_schedule(seed)
        simulator.run()
        for request in requests:
            assert request.tokens == expected(request), f"schedule {seed}"
        check_pages(simulator.machine)
        preempted += simulator.machine.num_preemptions > 0
        grafted += simulator.machine.pages.num_found > 0
    assert preempted > size / 20
    assert grafted > size / 20


@pytest.mark.parametrize("seed", first_soon(range(100), 25))
def test_every_page_is_accounted_for_after_every_iteration(seed):
    """Every page is held by exactly the requests that list it, with the tokens they expect."""
    simulator, _ = random_schedule(seed)
    run_checked(simulator)


def test_a_follower_borrows_the_shared_prefix_while_its_source_still_decodes():
    """Only its own tail is prefilled, and a divergent write copies one page."""
    system = tuple(range(1, 704))
    source = RequestDescriptor(0, prompt=(*system, 900), max_tokens=50, graft_source_id=-1)
    follower = RequestDescriptor(
        1, prompt=(*system, 901, 902), max_tokens=50, graft_source_id=0, arrival=1e-9
    )
    simulator = make([source, follower], page_size=16)
    simulator.step()
    assert source.state is State.DECODE_READY
    simulator.step()
    assert simulator.machine.num_prefilled == len(follower.prompt) - 1 - len(system)
    assert simulator.machine.pages.report().shared == len(system) // 16
    run_checked(simulator)
    assert [each.tokens for each in (source, follower)] == [expected(source), expected(follower)]


def test_a_prefix_is_found_after_its_source_is_done_and_until_its_pages_are_needed():
    """Retired prompts are the first use of free memory and the first to go."""
    first = RequestDescriptor(0, prompt=tuple(range(1, 33)), max_tokens=2)
    again = RequestDescriptor(
        1, prompt=tuple(range(1, 33)), max_tokens=2, arrival=1.0, graft_source_id=0
    )
    simulator = make([first, again], num_pages=40)
    run_checked(simulator)
    assert simulator.machine.pages.num_found == 31
    late = RequestDescriptor(2, prompt=tuple(range(100, 240)), max_tokens=4, arrival=2.0)
    crowded = make([*_twins(), late], num_pages=40)
    run_checked(crowded)
    assert not crowded.machine.requests[0].page_ids, "it made room"


def _twins():
    prompt = tuple(range(1, 33))
    return [RequestDescriptor(i, prompt=prompt, max_tokens=2) for i in range(2)]


def test_pages_run_out_on_the_least_important_first():
    """A request is never preempted for one of lower priority."""
    requests = [
        RequestDescriptor(i, prompt=(1 + i,) * 8, max_tokens=40, priority=i) for i in range(3)
    ]
    simulator = make(requests, num_pages=16)
    preempted = []
    while not simulator.machine.done:
        running = {each.request_id for each in simulator.machine.running()}
        simulator.step()
        preempted += [i for i in running if requests[i].state is State.WAITING]
    assert preempted
    assert 2 not in preempted
    assert [each.tokens for each in requests] == [expected(each) for each in requests]


def test_blocks_are_capped_while_the_pool_is_nearly_full():
    """A block that was chosen under pressure is at most 2, and others are not."""
    requests = [RequestDescriptor(i, prompt=(1 + i,) * 30, max_tokens=60) for i in range(4)]
    simulator = make(requests, num_pages=92, proposer=rates(1.0))
    chosen_under: dict[int, bool] = {}
    capped: list[int] = []
    free: list[int] = []
    while not simulator.machine.done:
        simulator.step()
        for request_id, block in simulator.iterations[-1].block_sizes.items():
            if request_id in chosen_under:
                (capped if chosen_under[request_id] else free).append(block)
        pressed = requests[0].under_pressure
        chosen_under = dict.fromkeys(range(len(requests)), pressed)
    assert max(capped) <= 2
    assert max(free) == 8


def test_time_is_what_the_table_says():
    """A lone greedy request pays one step a token and its prompt once."""
    request = RequestDescriptor(0, prompt=(1,) * 11, max_tokens=5)
    simulator = make([request], policy=FixedBlockPolicy(0))
    simulator.run()
    costs = simulator.costs
    assert simulator.machine.now == pytest.approx(5 * costs.step(1) + 10 * costs.prefill)
    assert len(simulator.iterations) == 5
