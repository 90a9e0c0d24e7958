"""The specification's policies decide in the engine as they do in the simulator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.config import max_block_size
from legato_engine.errors import InvalidField
from legato_engine.megakernel.descriptor import Flag, RequestDescriptor
from legato_engine.speculative.block_policy import AdaptiveBlockPolicy
from legato_engine.speculative.block_sizes import block_sizes
from legato_engine.speculative.budget_policy import TokenBudgetPolicy
from legato_engine.speculative.costs import CostTable

from tests.fakes import FakeTask, make_sequence

COSTS = CostTable(steps=((8, 1.0), (64, 2.0)), prefill=0.0)
CALM, FULL = 0.85, 0.86


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
    assert (block_sizes(setting, COSTS) is None) == (setting == "off")


@pytest.mark.parametrize(
    "setting", ["", "on", "fixed", "fixed:0", "fixed:17", "fixed:-1", "fixed:²"]
)
def test_other_settings_are_refused(setting):
    """What is not known is an invalid field that names itself."""
    with pytest.raises(InvalidField) as caught:
        max_block_size(setting)
    assert caught.value.metadata["field"] == "speculation"


def test_a_fixed_block_stays():
    """Whatever is accepted."""
    sizes, one = block_sizes("fixed:5", None), sequence()
    assert sizes is not None
    for accepted in (0, 5, 0):
        assert sizes.allot([one], kv_use=0.0) == [5]
        sizes.learn(one, accepted, 5)


outcomes = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), max_size=40)


@given(outcomes=outcomes, setting=st.sampled_from(["seed", "budget"]))
def test_a_sequence_learns_as_a_descriptor_does(outcomes, setting):
    """Over any outcomes, pressure and all, both hold the same numbers bit for bit."""
    sizes, one = block_sizes(setting, COSTS), sequence(max_tokens=1000)
    assert sizes is not None
    policy = AdaptiveBlockPolicy() if setting == "seed" else TokenBudgetPolicy(COSTS)
    request = RequestDescriptor(0, prompt=(1,), max_tokens=999)
    for step, (accepted, rejected, pressed) in enumerate(outcomes):
        proposed = accepted + rejected
        request.set_flag(Flag.KV_PRESSURE, on=pressed)
        if step == 0:
            policy.begin(request)
        policy.allot([request])
        assert sizes.allot([one], kv_use=FULL if pressed else CALM) == [request.current_block_size]
        request.block_size_history.append(proposed)
        policy.update(request, accepted, proposed)
        sizes.learn(one, accepted, proposed)
        record = one.draft_stats
        assert record.ema_acceptance_rate == request.ema_acceptance_rate
        assert (record.accepted_weight, record.tried_weight) == (
            request.accepted_weight,
            request.tried_weight,
        )
        assert record.block_size_history == request.block_size_history


def test_the_budget_sees_what_is_left():
    """Nothing is proposed beyond the last token that could still be launched."""
    sizes, one = block_sizes("budget", COSTS), sequence(max_tokens=4)
    assert sizes is not None
    assert sizes.allot([one], kv_use=0.0) == [2]
    one.progress.num_launched = 3
    assert sizes.allot([one], kv_use=0.0) == [0]
