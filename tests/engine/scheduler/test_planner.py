"""Turns between prefills and decodes."""

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import BatchLimits
from legato_engine.scheduler.decode import DecodePlanner
from legato_engine.scheduler.scheduler import Planner

from tests.engine.scheduler.planning import (
    PAGE,
    make_planner,
    members_of,
    plain,
    planned,
    running,
    sized,
)
from tests.fakes import make_sequence


def test_adapters_share_launches() -> None:
    """Prompts and decodes of any adapters share; only a missing adapter slot makes one wait."""
    manager = KVCacheManager(33, PAGE, 9, num_adapter_slots=1)
    planner = make_planner(manager, limits=BatchLimits(4, tokens=99, sampled=9))
    for seq_id, adapter in enumerate(("x", "", "y", "x")):
        planner.add(make_sequence(seq_id, adapter=adapter))
    one = running(9, launched=1)
    one.adapter.key = "x"
    turns = Planner(planner, plain(one), prefills_per_decode=1, crops_per_launch=0)
    plan = turns.plan()
    assert plan is not None
    assert (planned(plan), plan.num_mixed_decodes) == ([9, 0, 1], 1)


def test_mixed_decodes_count_as_decodes() -> None:
    """No decode runs between two prefills that include all decodes."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8), limits=BatchLimits(2, 20, 4))
    one = running(9, launched=1)
    planner = Planner(prefill, plain(one), prefills_per_decode=1, crops_per_launch=0)
    for seq_id, positions in enumerate((4, 4, 4, 30, 4)):
        prefill.add(sized(seq_id, positions))
    batches = [planned(planner.plan()) for _ in range(5)]
    assert batches == [[9, 0, 1], [9, 2], [3], [9], [9, 4]]


def test_prefills_and_decodes_take_turns() -> None:
    """`prefills_per_decode` prefills, then a decode; each continues alone while it has work."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8))
    one = running(9, launched=1)
    members = members_of()
    decode = DecodePlanner(KVCacheManager(17, PAGE, 2), members, None)
    planner = Planner(prefill, decode, prefills_per_decode=2, crops_per_launch=0)
    for seq_id in range(5):
        prefill.add(sized(seq_id, 4))
    plans = []
    for decodes in (True, True, True, False, False, False, True, False):
        one.preempted = not decodes
        members.add(one)
        plans.append(planner.plan())
    kinds = [None if plan is None else plan.kind.value for plan in plans]
    assert kinds == [*["prefill"] * 2, "decode", *["prefill"] * 3, "decode", None]
