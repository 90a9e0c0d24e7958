"""Plans are values: who is in the next batch, and at which position."""

from collections.abc import Sequence as Many

import msgspec
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefill_work import PrefillWork
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.planner import Planner
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence

from tests.fakes import FakeTask, make_sequence

PAGE = 4


def make_planner(
    manager: KVCacheManager, *, max_overtakes: int = 16, limits: BatchLimits = ALONE
) -> PrefillPlanner:
    """A planner with an empty queue."""
    queue = WaitingQueue(max_overtakes=max_overtakes, priority_seconds=1.0)
    return PrefillPlanner(manager, queue, limits)


def running(seq_id: int, *, launched: int, max_tokens: int = 8, refs: int = 0) -> Sequence:
    """A sequence of prefix 1 and prompt 3, `launched` samples planned."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=max_tokens))
    sequence.progress.num_launched = launched
    sequence.progress.last_position = sequence.prompt_length + launched - 1
    sequence.inflight_refs = refs
    sequence.pages.capacity = sequence.max_length
    sequence.pages.ids = tuple(range(1, -(-sequence.max_length // PAGE) + 1))
    return sequence


def those(*sequences: Sequence) -> RunningSequences:
    """They hold a row, and pages enough for all their tokens."""
    queue = WaitingQueue(max_overtakes=0, priority_seconds=1.0)
    members = RunningSequences(KVCacheManager(17, PAGE, 1), queue)
    for sequence in sequences:
        members.add(sequence)
    return members


def sized(seq_id: int, positions: int) -> Sequence:
    """A text-only sequence of that many positions, all of which it needs at once."""
    return make_sequence(seq_id, FakeTask(num_prompt=positions - 1, max_tokens=1))


def planned(plan: Plan | None) -> list[int]:
    """Who is in a plan."""
    return [] if plan is None else [row.sequence.seq_id for row in plan.rows]


def plain(*sequences: Sequence) -> DecodePlanner:
    """A planner that never speculates."""
    return DecodePlanner(KVCacheManager(17, PAGE, 2), those(*sequences), None)


def speculating(
    blocks: BlockSizes, *sequences: Sequence, manager: KVCacheManager | None = None
) -> DecodePlanner:
    """A planner that has them propose."""
    manager = manager or KVCacheManager(17, PAGE, 8)
    return DecodePlanner(manager, those(*sequences), blocks)


def test_decode_feeds_the_last_launched_token() -> None:
    """The first decode is at the prompt's end, each next one position on."""
    first, later = running(0, launched=1), running(1, launched=3, refs=1)
    assert plain(first, later).plan() == Plan(
        LaunchKind.DECODE,
        (ScheduledSequence(first, position=4), ScheduledSequence(later, position=6)),
    )


def test_decode_leaves_out_who_cannot_go_on() -> None:
    """Those being preempted, with all tokens launched, two launches ahead or not prefilled."""
    leaving = running(0, launched=1)
    leaving.preempted = True
    encoding = running(4, launched=2)
    encoding.progress.last_position = -1
    full = running(1, launched=8)
    ahead = running(2, launched=3, refs=2)
    last = running(3, launched=7)
    assert planned(plain(leaving, full, ahead, encoding, last).plan()) == [3]
    assert plain(leaving, full, ahead, encoding).plan() is None


def test_who_streams_does_so_without_a_page_too() -> None:
    """A picture is split for whoever reads token by token, though no page is free for the next."""
    waiting = running(0, launched=2)
    waiting.pages.capacity = waiting.progress.last_position
    assert plain(waiting).streams
    waiting.preempted = True
    assert not plain(waiting).streams
    whole = running(1, launched=2)
    whole.request = msgspec.structs.replace(whole.request, deltas=False)
    assert not plain(whole, running(2, launched=8)).streams


class Blocks:
    """Always the same block; remembers whom it was asked about."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.asked: list[tuple[list[int], float]] = []

    def allot(self, sequences: Many[Sequence], *, kv_use: float) -> list[int]:
        """The size for everybody."""
        self.asked.append(([sequence.seq_id for sequence in sequences], kv_use))
        return [self._size] * len(sequences)

    def learn(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """Nothing."""


def test_a_decode_drafts_no_more_than_its_task_may_sample() -> None:
    """Who is near its end drafts less; who is constrained or carries values not at all."""
    long, near = running(0, launched=1, max_tokens=20), running(1, launched=3, max_tokens=6)
    last, boxes = running(2, launched=7), running(3, launched=2)
    outline = running(4, launched=2)
    boxes.task.constrained = outline.task.has_payload = True
    blocks = Blocks(4)
    plan = speculating(blocks, long, boxes, near, outline, last).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [4, 0, 2, 0, 0]
    assert blocks.asked == [([0, 1, 2], 0.0)]


def test_a_row_foresees_the_last_position_it_may_write() -> None:
    """Behind launches that drafted it may start later, and never goes past its sequence's end."""
    sequence = running(0, launched=2, max_tokens=30, refs=1)
    sequence.progress.inflight_drafts = 3
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    (row,) = plan.rows
    assert (row.position, row.slack, row.num_drafts) == (5, 3, 4)
    assert row.end == 5 + 3 + 5
    sequence.progress.num_launched = 28
    sequence.progress.last_position = sequence.prompt_length + 27
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    assert plan.rows[0].num_drafts == 1
    assert plan.rows[0].end == sequence.max_length


def test_a_launch_names_the_pages_that_none_before_it_could_reach() -> None:
    """Those that begin between its own farthest start and its end, several at a time."""
    sequence = running(0, launched=2, max_tokens=60)
    rows = [
        ScheduledSequence(sequence, 5, num_drafts=k, slack=s)
        for k, s in ((0, 0), (2, 0), (8, 2), (8, 4))
    ]
    assert [list(row.new_pages(PAGE)) for row in rows] == [[], [], [2, 3], [3, 4]]
    assert list(ScheduledSequence(sequence, 8).new_pages(PAGE)) == [2]


def grown(seq_id: int, manager: KVCacheManager) -> Sequence:
    """Admitted with prefix 1 and prompt 3; its first token is launched, and its page is there."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=30))
    manager.admit(sequence)
    sequence.progress.num_launched, sequence.progress.last_position = 1, sequence.prompt_length
    manager.launched(sequence)
    return sequence


def test_proposals_take_no_page_that_somebody_needs_to_grow() -> None:
    """Without pages for all of its proposals a row has none, and decodes one token."""
    manager = KVCacheManager(7, PAGE, 2)  # two of two pages each; two are free
    first, second = grown(0, manager), grown(1, manager)
    plan = speculating(Blocks(8), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [0, 0]
    plan = speculating(Blocks(7), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [7, 0]
    assert manager.stats().draft == 1


def test_who_may_stand_behind_its_pages_waits_for_its_launch() -> None:
    """While it is not known how many stand, a row needs pages for the farthest case."""
    manager = KVCacheManager(5, PAGE, 2)  # two of two pages each
    first, second = grown(0, manager), grown(1, manager)
    first.progress.inflight_drafts, first.inflight_refs = 3, 1
    planner = speculating(Blocks(1), first, second, manager=manager)
    assert planned(planner.plan()) == [0, 1]
    first.progress.inflight_drafts = 4
    assert planned(planner.plan()) == [1]
    first.progress.inflight_drafts = 0
    assert planned(planner.plan()) == [0, 1]


def test_pressure_is_what_live_sequences_hold() -> None:
    """A policy is told the share of the pages that are held."""
    manager = KVCacheManager(17, PAGE, 8)
    manager.admit(sized(0, 8 * PAGE))
    blocks = Blocks(1)
    speculating(blocks, running(1, launched=1), manager=manager).plan()
    assert blocks.asked == [([1], 0.5)]


def test_a_prefill_row_says_where_the_prompt_starts() -> None:
    """The prompt starts behind the prefix and is prefilled whole."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, FakeTask(num_prompt=3), prefix_key="k", prefix_length=9)
    planner.add(sequence)
    plan = planner.plan()
    assert plan is not None
    pages = plan.rows[0].work.compute_pages
    work = PrefillWork(pages, (pages[2], sequence.pages.ids[2]))
    assert plan == Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 9, 3, work),))
    assert len(planner) == 0
    assert planner.plan() is None


def test_prefills_are_first_come_first_served() -> None:
    """One sequence a launch by default, in the order of arrival."""
    planner = make_planner(KVCacheManager(17, PAGE, 3))
    for seq_id in range(3):
        planner.add(sized(seq_id, 4))
    assert [planned(planner.plan()) for _ in range(3)] == [[0], [1], [2]]


def test_a_prefill_batch_has_bounded_rows() -> None:
    """As many prompts as are allowed, in as many tokens and sampled rows."""
    for limits, batches in (
        (BatchLimits(3, tokens=99, sampled=9), [[0, 1, 2], [3, 4]]),
        (BatchLimits(9, tokens=11, sampled=9), [[0, 1], [2, 3], [4]]),
        (BatchLimits(9, tokens=99, sampled=4), [[0, 1, 2, 3], [4]]),
        (BatchLimits(9, tokens=3, sampled=9), [[0], [1], [2], [3], [4]]),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        for seq_id in range(5):
            planner.add(sized(seq_id, 4))
        assert [planned(planner.plan()) for _ in batches] == batches


def test_a_picture_to_be_computed_only_begins_a_launch() -> None:
    """Nobody waits for a picture who would have run before it; who asks about a known one joins,
    and who asks about the same.
    """
    manager = KVCacheManager(33, PAGE, 9)
    planner = make_planner(manager, limits=BatchLimits(9, tokens=99, sampled=9))
    keys = ("a", "a", "b", None, "a")
    sequences = [
        make_sequence(n, prefix_key=key, prefix_length=4 if key else 1)
        for n, key in enumerate(keys)
    ]
    for sequence in sequences[:4]:
        planner.add(sequence)
    plan = planner.plan()
    assert planned(plan) == [0, 1], "what is next computes a picture"
    assert plan is not None
    assert [bool(row.work.compute_pages) for row in plan.rows] == [True, False]
    planner.add(sequences[4])
    assert planned(planner.plan()) == [2, 3, 4]
    assert [sequence.pages.cached_tokens for sequence in sequences] == [0, 4, 0, 0, 4]


def test_pictures_share_a_launch_while_a_crowd_waits() -> None:
    """As many as are allowed, in front of everybody else, beside as many questions as ever; a
    question that is first has them join it. None joins where few wait, an answer is long already or
    streams would wait, or a picture that no encoder takes is first.
    """

    def plan(
        *keys: str | None,
        images: int = 2,
        min_queue_length: int = 1,
        said: int = 0,
        streams: bool = False,
    ) -> list[int]:
        manager = KVCacheManager(65, PAGE, 9)
        limits = BatchLimits(
            3, tokens=99, sampled=9, images=images, min_queue_length=min_queue_length
        )
        planner = make_planner(manager, limits=limits)
        for n, key in enumerate(keys):
            length, crops = (4, 0 if key == "host" else 3) if key else (1, 0)
            planner.add(make_sequence(n, prefix_key=key, prefix_length=length, num_crops=crops))
        decodes = riders(running(90, launched=said, max_tokens=99)) if said else ()
        made = planner.plan(riding=decodes, streams=streams)
        assert made is not None
        computed = [row.encodes for row in made.prefills]
        assert computed == sorted(computed, reverse=True), "pictures come first"
        assert made.num_mixed_decodes == len(decodes)
        return planned(made)[made.num_mixed_decodes :]

    assert plan("a", "b", "c") == [0, 1]
    assert plan("a", "b", "c", images=3, min_queue_length=0) == [0, 1, 2]
    assert plan("a", "a", "b", "b", "c", None) == [0, 2, 1, 3]
    assert plan("a", "a", "b", "b", "a", "b") == [0, 2, 1, 3], "three and a picture more"
    assert plan("a", "b", min_queue_length=2) == [0]
    assert plan("a", "b", "c", min_queue_length=2) == [0, 1]
    assert plan("a", "b", "c", said=7) == [0, 1]
    assert plan("a", "b", "c", said=8) == [0]
    assert plan("a", "b", "c", streams=True) == [0]
    assert plan(None, "b", "c") == [1, 2, 0]
    assert plan(None, "b", "c", min_queue_length=9) == [0]
    assert plan("host", "b", "c") == [0]
    assert plan("a", "host", "c") == [0]


def riders(*sequences: Sequence) -> tuple[ScheduledSequence, ...]:
    """Their rows in a decode."""
    plan = plain(*sequences).plan()
    assert plan is not None
    return plan.rows


def test_who_decodes_rides_with_a_prompt() -> None:
    """They go first, all of them, and the prompts behind them as far as there is room."""
    riding = riders(running(7, launched=1), running(8, launched=2))
    for limits, seq_ids, num_mixed_decodes in (
        (BatchLimits(4, tokens=10, sampled=4), [7, 8, 0, 1], 2),
        (BatchLimits(4, tokens=9, sampled=4), [7, 8, 0], 2),
        (BatchLimits(4, tokens=99, sampled=3), [7, 8, 0], 2),
        (BatchLimits(4, tokens=5, sampled=4), [0], 0),
        (BatchLimits(4, tokens=99, sampled=2), [0, 1], 0),
        (ALONE, [0], 0),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        planner.add(sized(0, 4))
        planner.add(sized(1, 4))
        plan = planner.plan(riding=riding)
        assert plan is not None
        assert (planned(plan), plan.num_mixed_decodes) == (seq_ids, num_mixed_decodes)
        assert plan.decodes == riding[:num_mixed_decodes]
        assert [row.sequence.seq_id for row in plan.prefills] == seq_ids[num_mixed_decodes:]


def test_adapters_share_launches() -> None:
    """Prompts and riders share whatever adapters they have; only who lacks a slot has to wait."""
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


def test_a_shared_launch_waits_for_the_constraints_of_its_decodes() -> None:
    """A prompt's own are known when it is planned."""
    free, boxes = running(0, launched=1), running(1, launched=1)
    boxes.task.constrained = True
    prompt = ScheduledSequence(boxes, 0, 3)
    for riding, waits in ((riders(free), False), (riders(free, boxes), True)):
        plan = Plan(LaunchKind.PREFILL, (*riding, prompt), len(riding))
        assert plan.constrained is waits


def test_a_large_request_is_overtaken_only_so_often() -> None:
    """Small ones pass a large one that does not fit, until it blocks them; then it is next."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=2)
    holder = sized(0, 16)
    manager.admit(holder)
    planner.add(sized(1, 32))
    small = [sized(seq_id, 4) for seq_id in range(2, 6)]
    for sequence in small:
        planner.add(sequence)
    assert [planned(planner.plan()) for _ in range(3)] == [[2], [3], []]
    manager.release(holder)
    assert planner.plan() is None
    for sequence in small[:2]:
        manager.release(sequence)
    assert planned(planner.plan()) == [1]


def test_a_blocking_request_goes_before_all_behind_it() -> None:
    """When the large one fits at last, it is taken first."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=0)
    holder = sized(0, 4)
    manager.admit(holder)
    planner.add(sized(1, 32))
    planner.add(sized(2, 4))
    assert planner.plan() is None
    manager.release(holder)
    assert planned(planner.plan()) == [1]


def test_the_queue_is_searched_no_deeper_than_it_may_be_overtaken() -> None:
    """A request beyond the look-ahead waits even if it fits."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=1)
    manager.admit(sized(0, 16))
    for seq_id, positions in ((1, 32), (2, 32), (3, 4)):
        planner.add(sized(seq_id, positions))
    assert planner.plan() is None


def test_a_removed_sequence_is_not_planned() -> None:
    """Who left the queue is not prefilled."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    first, second = sized(0, 4), sized(1, 4)
    planner.add(first)
    planner.add(second)
    planner.remove(first)
    assert planned(planner.plan()) == [1]


def test_an_encode_row_names_its_crops_and_feeds_no_token() -> None:
    """The parts of a picture carry the same pages, each its crops, and the prefill the rest."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, prefix_key="k", prefix_length=8, num_crops=5)
    planner.add(sequence)
    plans = [planner.plan(max_crops=2), planner.plan(max_crops=2), planner.plan()]
    assert plans[0] is not None
    pages = plans[0].rows[0].work.compute_pages
    parts = [PrefillWork(pages, None, first, stop) for first, stop in ((0, 2), (2, 4), (4, 0))]
    assert plans == [
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[0]),)),
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[1]),)),
        Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 8, 1, parts[2]),)),
    ]
    assert not planner.due


def test_a_sequence_given_up_between_its_parts_is_planned_no_more() -> None:
    """The next in the queue is, and nothing of the first is left in the planner."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    large, text = make_sequence(0, num_crops=5), sized(1, 4)
    planner.add(large)
    planner.add(text)
    assert planned(planner.plan(max_crops=2)) == [0]
    assert len(planner) == 1
    planner.remove(large)
    assert planned(planner.plan(max_crops=2)) == [1]
    assert not planner.due


def test_riders_take_their_turn_in_every_prefill() -> None:
    """No decode comes between two prefills in which all who could decode ride."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8), limits=BatchLimits(2, 20, 4))
    one = running(9, launched=1)
    planner = Planner(prefill, plain(one), prefills_per_decode=1, crops_per_launch=0)
    for seq_id, positions in enumerate((4, 4, 4, 30, 4)):
        prefill.add(sized(seq_id, positions))
    batches = [planned(planner.plan()) for _ in range(5)]
    assert batches == [[9, 0, 1], [9, 2], [3], [9], [9, 4]]


def test_both_sides_take_turns() -> None:
    """So many prefills, then a decode; either side alone goes on as long as it has work."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8))
    one = running(9, launched=1)
    members = those()
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
