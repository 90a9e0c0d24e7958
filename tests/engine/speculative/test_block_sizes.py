"""The kernels decide as the specification's policies do, and the engine bounds and records it."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import max_block_size
from legato_engine.errors import InvalidField
from legato_engine.runtime.descriptors import STARTS
from legato_engine.scheduler.interfaces import RowTokens
from legato_engine.sequence import Descriptor, SampledToken
from legato_engine.speculative.policy import (
    INITIAL_RATE,
    AdaptiveBlockPolicy,
    CostTable,
    FixedBlockPolicy,
    TokenBudgetPolicy,
    block_policy,
    block_sizes,
)

from tests.engine.speculative.drafted import Flag, RequestDescriptor
from tests.engine.speculative.policy_source import COMPILER, PolicySource, expected_layout
from tests.fakes import FakeTask, make_sequence

COSTS = CostTable(steps=((8, 1.0), (64, 2.0)), prefill=0.0)
ROWS = 5
MAX_TOKENS = 10_000

compiles = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def bounds(setting):
    """Those of a setting that drafts."""
    sizes = block_sizes(setting)
    assert sizes is not None
    return sizes


def sequence(max_tokens=100):
    """One whose first token is launched."""
    made = make_sequence(0, FakeTask(max_tokens=max_tokens))
    made.progress.num_launched = 1
    return made


@pytest.mark.parametrize(
    ("setting", "block"), [("off", 0), ("seed", 8), ("budget", 8), ("fixed:1", 1), ("fixed:16", 16)]
)
def test_settings(setting, block):
    """Every setting says how much room a row needs, and off decides nothing."""
    assert max_block_size(setting) == block
    assert (block_sizes(setting) is None) == (setting == "off")
    policy = block_policy(setting)
    assert (0 if policy is None else policy.max_block) == block


@pytest.mark.parametrize(
    "setting", ["", "on", "fixed", "fixed:0", "fixed:17", "fixed:-1", "fixed:²"]
)
def test_other_settings_are_refused(setting):
    """What is not known is an invalid field that names itself."""
    with pytest.raises(InvalidField) as caught:
        max_block_size(setting)
    assert caught.value.metadata["field"] == "speculation"


# ---------------------------------------------------------------- what the host bounds


def test_a_fixed_block_has_room_always():
    """Whatever the pressure."""
    sizes, one = bounds("fixed:5"), sequence()
    assert [sizes.allot([one], under_pressure=pressed) for pressed in (False, True)] == [[5], [5]]


def test_the_budget_has_little_room_under_pressure():
    """Its block of the same launch is capped."""
    sizes, one = bounds("budget"), sequence()
    assert sizes.allot([one], under_pressure=False) == [8]
    assert sizes.allot([one], under_pressure=True) == [2]


def test_the_seed_has_little_room_after_a_launch_under_pressure():
    """The launch in which the pressure begins drafts what the launch before it chose."""
    sizes, one = bounds("seed"), sequence()
    pressed = (False, True, True, True, False, False)
    rooms = [sizes.allot([one], under_pressure=each) for each in pressed]
    assert rooms == [[8], [8], [2], [2], [8], [8]]


def test_a_commit_keeps_what_the_device_learnt():
    """The numbers as they are, and one more block of its history."""
    sizes, one = bounds("budget"), sequence()
    learnt = Descriptor(3.5, 4.0, 0.875, 6, 0, 0)
    for drafted in (3, 0):
        sizes.learn(one, RowTokens((SampledToken(1, (0.0, 0.0)),), drafted, learnt))
    stats = one.draft_stats
    assert stats is not None
    assert (stats.learnt, stats.block_size_history) == (learnt, [3, 0])


# ---------------------------------------------------------------- what the device decides


@dataclasses.dataclass
class Step:
    """One launch: its pressure and, by row, its room and a rate of right draft tokens."""

    pressed: bool
    rooms: list[int | None]  # None: the row is not in the launch
    luck: list[int]


rooms = st.one_of(st.none(), st.just(8), st.integers(-1, 8))
steps = st.builds(
    Step,
    st.booleans(),
    st.lists(rooms, min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS),
)
tables = st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=6).map(
    lambda seconds: CostTable(
        tuple((8 * (index + 1), each) for index, each in enumerate(sorted(seconds))),
        prefill=0.0,
        propose=seconds[0] / 50,
    )
)
policies = st.one_of(
    st.just(AdaptiveBlockPolicy()),
    st.just(FixedBlockPolicy(5)),
    tables.map(TokenBudgetPolicy),
)


class BothSides:
    """The specification over descriptors, and the kernels' source, given the same launches."""

    def __init__(self, policy, folder, fault=("", "")):
        self.policy = policy
        self.source = PolicySource(policy, ROWS, folder, fault)
        self.asked = [RequestDescriptor(row, MAX_TOKENS) for row in range(ROWS)]
        self.source.requests["flags"] = STARTS
        self.source.requests["ema_acceptance_rate"] = INITIAL_RATE
        self.begun = set()
        if isinstance(policy, TokenBudgetPolicy):
            count = len(self.source.seconds)
            self.source.seconds[:] = [policy.costs.step(each) for each in range(count)]
            counts = policy.overall
            self.source.overall[:] = counts.accepted_weight, counts.tried_weight

    def launch(self, step):
        """Run one launch on both; every decision and number must agree."""
        rows = [row for row, room in enumerate(step.rooms) if room is not None]
        self.source.allot([(row, step.rooms[row]) for row in rows], under_pressure=step.pressed)
        drafting = [row for row in rows if step.rooms[row] >= 0]
        for row in drafting:
            request = self.asked[row]
            request.set_flag(Flag.KV_PRESSURE, on=step.pressed)
            request.max_tokens = step.rooms[row] + 1
            if row not in self.begun:
                self.begun.add(row)
                self.policy.begin(request)
        if drafting:
            self.policy.allot([self.asked[row] for row in drafting])
        self.compare()
        for row in drafting:
            request = self.asked[row]
            proposed = min(request.current_block_size, step.rooms[row])
            accepted = min(proposed, step.luck[row])
            request.block_size_history.append(proposed)
            self.policy.update(request, accepted, proposed)
            self.source.update(row, accepted, proposed)
        self.compare()

    def compare(self):
        """Bit for bit."""
        is_budget = isinstance(self.policy, TokenBudgetPolicy)
        for row in self.begun:
            mine, its = self.asked[row], self.source.requests[row]
            assert its["current_block_size"] == mine.current_block_size
            assert its["accepted_weight"] == mine.accepted_weight
            assert its["tried_weight"] == mine.tried_weight
            assert its["ema_acceptance_rate"] == np.float32(mine.ema_acceptance_rate)
        if is_budget:
            counts = self.policy.overall
            assert self.source.overall.tolist() == [counts.accepted_weight, counts.tried_weight]


@compiles
@pytest.mark.parametrize(
    "policy", [FixedBlockPolicy(3), AdaptiveBlockPolicy(), TokenBudgetPolicy(COSTS)]
)
def test_host_and_device_have_one_descriptor(policy, tmp_path_factory):
    """Offsets, sizes and flags."""
    source = PolicySource(policy, 3, tmp_path_factory.getbasetemp())
    assert source.layout() == expected_layout(policy)


@compiles
@settings(deadline=None)
@given(policy=policies, launches=st.lists(steps, max_size=60))
def test_the_source_of_the_kernels_decides_as_the_specification(policy, launches, tmp_path_factory):
    """Over any launches: rows come and go, pressure, little room, any costs."""
    fresh = policy
    if isinstance(policy, TokenBudgetPolicy):
        fresh = TokenBudgetPolicy(policy.costs)
    sides = BothSides(fresh, tmp_path_factory.getbasetemp())
    for step in launches:
        sides.launch(step)


def drifting(sides, num_launches):
    """Run launches whose acceptance drifts, some under pressure; return all block sizes."""
    draw, seen = random.Random(num_launches), set[int]()
    for step in range(num_launches):
        rate = 0.0 if step % 500 < 100 else draw.random()
        luck = [sum(draw.random() < rate for _ in range(8)) for _ in range(ROWS)]
        sides.launch(Step(step % 700 > 650, [8] * ROWS, luck))
        seen.update(request.current_block_size for request in sides.asked)
    return seen


FAULTS = {
    "seed": [
        ("__fmul_rn((float)rule.alpha, rate)", "(float)(rule.alpha * (double)rate)"),
        ("average >= (float)rule.low", "average > (float)rule.high"),
        ("block > PRESSURE_BLOCK ? PRESSURE_BLOCK", "block > PRESSURE_BLOCK ? MID_BLOCK"),
        ("verified ? adaptive_size(request, rule) : ", ""),
    ],
    "budget": [
        ("speed > (seconds > longer ? better : best)", "speed > best"),
        ("accepted + (accepted < proposed)", "proposed"),
        ("request.idle_steps >= PROBE_EVERY", "request.idle_steps >= PROBE_EVERY - 1"),
        ("__dmul_rn(rule.propose, (double)all.longest[k])", "rule.propose"),
    ],
}
HARMLESS = {"(float)(rule.alpha * (double)rate)", ""}
"""A product of two floats in double rounds to the same float; every row here starts afresh."""


@compiles
@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_in_the_source_is_noticed(name, fault, tmp_path_factory):
    """Wrong orders, roundings, thresholds, caps and counts; what changes nothing passes."""
    costs = dataclasses.replace(COSTS, propose=0.002)
    policy = AdaptiveBlockPolicy() if name == "seed" else TokenBudgetPolicy(costs)
    sides = BothSides(policy, tmp_path_factory.getbasetemp(), fault)
    sides.source._rule[-1] = 0.002 if name == "budget" else 0.0
    if fault[1] in HARMLESS:
        drifting(sides, 1500)
        return
    with pytest.raises(AssertionError):
        drifting(sides, 1500)


CLIFF = CostTable(steps=((16, 1.0), (17, 3.0), (64, 3.5)), prefill=0.0)
TIES = [
    ("depth != depth2 ? depth < depth2", "depth != depth2 ? depth > depth2"),
    ("depth < depth2 : index < index2", "depth < depth2 : index > index2"),
]


@compiles
@pytest.mark.parametrize("fault", [("", ""), *TIES])
def test_equal_gains_have_an_order(fault, tmp_path_factory):
    """Of tokens that are all certain, lower depths go first, then earlier rows."""
    sides = BothSides(TokenBudgetPolicy(CLIFF), tmp_path_factory.getbasetemp(), fault)
    for row, request in enumerate(sides.asked):
        request.accepted_weight = request.tried_weight = 8.0
        sides.source.requests[row]["accepted_weight"] = 8.0
        sides.source.requests[row]["tried_weight"] = 8.0
    step = Step(pressed=False, rooms=[8] * ROWS, luck=[8] * ROWS)
    if fault != ("", ""):
        with pytest.raises(AssertionError):
            sides.launch(step)
        return
    sides.launch(step)
    assert [request.current_block_size for request in sides.asked] == [3, 2, 2, 2, 2]


@compiles
@pytest.mark.parametrize("name", ["seed", "budget"])
def test_ten_thousand_launches_stay_together(name, tmp_path_factory):
    """Rates of acceptance that drift, so that all sizes and the probes occur."""
    policy = AdaptiveBlockPolicy() if name == "seed" else TokenBudgetPolicy(COSTS)
    sides = BothSides(policy, tmp_path_factory.getbasetemp())
    seen = drifting(sides, 10_000)
    assert seen >= ({1, 2, 4, 8} if name == "seed" else {0, 1, 2, 8})
