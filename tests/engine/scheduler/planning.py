"""Sequences, planners and plans for tests of the planners."""

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import ALONE, BatchLimits, Plan, ScheduledSequence
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence

from tests.fakes import FakeTask, make_sequence

PAGE = 4


def make_planner(
    manager: KVCacheManager, *, max_overtakes: int = 16, limits: BatchLimits = ALONE
) -> PrefillPlanner:
    """Return a planner with an empty queue."""
    queue = WaitingQueue[Sequence](max_overtakes=max_overtakes, priority_seconds=1.0)
    return PrefillPlanner(manager, queue, limits)


def running(seq_id: int, *, launched: int, max_tokens: int = 8, refs: int = 0) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3 with `launched` tokens launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=max_tokens))
    sequence.progress.num_launched = launched
    sequence.progress.last_position = sequence.prompt_length + launched - 1
    sequence.inflight_refs = refs
    sequence.pages.capacity = sequence.max_length
    sequence.pages.ids = tuple(range(1, -(-sequence.max_length // PAGE) + 1))
    return sequence


def members_of(*sequences: Sequence) -> RunningSequences:
    """Return these as the running sequences."""
    queue = WaitingQueue[Sequence](max_overtakes=0, priority_seconds=1.0)
    members = RunningSequences(KVCacheManager(17, PAGE, 1), queue)
    for sequence in sequences:
        members.add(sequence)
    return members


def sized(seq_id: int, positions: int) -> Sequence:
    """Return a text-only sequence that needs all its positions at once."""
    return make_sequence(seq_id, FakeTask(num_prompt=positions - 1, max_tokens=1))


def planned(plan: Plan | None) -> list[int]:
    """Return the ids of the sequences in a plan."""
    return [] if plan is None else [row.sequence.seq_id for row in plan.rows]


def plain(*sequences: Sequence) -> DecodePlanner:
    """Return a planner without speculation."""
    return DecodePlanner(KVCacheManager(17, PAGE, 2), members_of(*sequences), None)


def decodes_of(*sequences: Sequence) -> tuple[ScheduledSequence, ...]:
    """Return these as scheduled in a decode."""
    plan = plain(*sequences).plan()
    assert plan is not None
    return plan.rows
