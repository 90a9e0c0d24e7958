"""What is launched behind a loop, while only the device knows how far that is."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import BatchLimits, Launch, LaunchKind, Plan
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import Sequence

from tests.engine.scheduler.reading_runner import PAGE, WORTHWHILE, ReadingRunner, alone
from tests.fakes import FakeClock, FakeSink, FakeTask, make_sequence

LIMITS = BatchLimits(3, tokens=40, sampled=6)
ROWS = 4


class Late(random.Random):
    """A device that goes on for as many steps as it may after it was told to end a loop."""

    def randint(self, a: int, b: int) -> int:
        """The most."""
        return b


class Keeping(ReadingRunner):
    """Keeps the plans, and how many plans and rows there were whenever a loop was told to end."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(lambda: False, draw)
        self.plans: list[Plan] = []
        self.plans_at_ends: list[int] = []
        self.rows_at_ends: list[int] = []
        self.in_flight_at_samples: list[int] = []  # launches when a loop was sampled
        self.num_rows: Callable[[], int] = lambda: 0

    def forward(self, launch: Launch) -> None:
        """As it is."""
        self.plans.append(launch.plan)
        super().forward(launch)

    def sample(self, launch: Launch, constraints: SequenceOf[int]) -> None:
        """As it is."""
        if launch.plan.is_loop:
            self.in_flight_at_samples.append(len(self._read))
        super().sample(launch, constraints)

    def stop_loop(self, launch: Launch) -> None:
        """As it is."""
        self.plans_at_ends.append(len(self.plans))
        self.rows_at_ends.append(self.num_rows())
        super().stop_loop(launch)


class Looping:
    """A scheduler that decodes by loops."""

    def __init__(
        self,
        draw: random.Random,
        num_pages: int = 60,
        *,
        limits: BatchLimits = LIMITS,
        loops: bool = True,
    ) -> None:
        self.has_command = False  # to be read before the step's tokens
        self.runner = Keeping(draw)
        self.manager = KVCacheManager(num_pages, PAGE, ROWS)
        self.runner.num_rows = lambda: self.manager.rows_used
        self.scheduler = Scheduler(
            self.runner,
            self.manager,
            Pipeline(2),
            FakeClock(),
            FakeSink(),
            limits=limits,
            loops=self.runner if loops else None,
            pause=lambda _: self.has_command,
        )
        self.sequences: list[Sequence] = []

    def submit(
        self, max_tokens: int, *, constrained: bool = False, num_prompt: int = 1
    ) -> FakeTask:
        """A request that has all of its tokens; constraints follow the table."""
        for seed in range(1000):
            task = FakeTask(
                seed=seed,
                max_tokens=max_tokens,
                num_prompt=num_prompt,
                constrained=constrained,
                uses_transition_table=constrained,
            )
            sequence = make_sequence(len(self.sequences), task, prefix_key="")
            if len(alone(sequence)) == max_tokens:
                self.scheduler.submit(sequence)
                self.sequences.append(sequence)
                return task
        raise AssertionError("every answer stops early")

    def until(self, task: FakeTask, num_tokens: int) -> None:
        """Step until it has so many."""
        while len(task.tokens) < num_tokens:
            self.scheduler.step()

    def drain(self) -> None:
        """All answers are what they are alone, and nothing is in use."""
        self.scheduler.drain()
        self.manager.check()
        for sequence in self.sequences:
            assert isinstance(sequence.task, FakeTask)
            assert sequence.task.tokens == alone(sequence)
        assert self.scheduler.load().pages_used == 0

    def behind(self) -> list[tuple[LaunchKind, list[int], int]]:
        """Kind, decoding sequences and number of prompts of each launch behind a loop."""
        return [
            (plan.kind, [row.sequence.seq_id for row in plan.decodes], len(plan.prefills))
            for plan in self.runner.plans
            if plan.behind
        ]


@pytest.mark.parametrize("draw", [Late(), random.Random(0)])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_prompt_joins_the_rows_of_the_loop_that_it_ends(
    draw: random.Random, constrained: bool
) -> None:
    """One launch has both, and the rows go on where the loop left them."""
    world = Looping(draw)
    first = world.submit(40, constrained=constrained)
    world.until(first, 10)
    world.submit(5)
    world.drain()
    assert world.behind()[0] == (LaunchKind.PREFILL, [0], 1)


def test_a_loop_is_told_to_end_before_a_prompt_is_admitted_behind_it() -> None:
    """It ends beside that, which takes the host about as long as the device has for a step."""
    world = Looping(random.Random(0))
    first = world.submit(40)
    world.until(first, 10)
    assert not world.runner.plans_at_ends
    world.submit(5)
    world.scheduler.step()
    assert world.runner.plans[-1].behind
    assert world.runner.plans_at_ends[0] == len(world.runner.plans) - 1
    assert world.runner.rows_at_ends[0] == 1
    world.drain()


def test_what_arrives_during_a_step_is_handled_before_its_end() -> None:
    """The wait for the step's tokens is cut short, and a prompt is enqueued behind the loop."""
    world = Looping(random.Random(0))
    first = world.submit(40)
    world.until(first, 10)
    have, steps = len(first.tokens), world.scheduler.steps_committed
    world.has_command = True
    world.scheduler.step()
    assert len(first.tokens) == have
    assert world.scheduler.steps_committed == steps
    world.has_command = False
    world.submit(5)
    world.scheduler.step()
    assert len(first.tokens) == have
    assert world.runner.plans[-1].behind
    world.drain()


def test_after_a_short_loop_come_as_many_single_steps_as_one_is_worth() -> None:
    """A request that cut it short may be one of many."""
    world = Looping(random.Random(0))
    first = world.submit(60)
    while not world.runner.plans[-1:] or not world.runner.plans[-1].is_loop:
        world.scheduler.step()
    world.submit(30)
    world.until(first, 30)
    plans = iter(world.runner.plans)
    next(plan for plan in plans if plan.behind)
    assert [plan.is_loop for plan in plans].index(True) == WORTHWHILE
    world.drain()


def test_prompts_without_pages_end_one_loop_in_vain() -> None:
    """The next ones go on until the prompts fit."""
    world = Looping(random.Random(0), num_pages=40)
    first = world.submit(80)
    world.until(first, 10)
    for _ in range(2):
        world.submit(4, num_prompt=100)
    world.until(first, 14)
    ends = list(world.runner.plans_at_ends)
    assert ends
    world.until(first, 60)
    assert world.runner.plans_at_ends == ends
    assert sum(plan.is_loop for plan in world.runner.plans) == 2
    world.drain()


def test_a_loop_goes_on_while_no_waiting_prompt_has_a_row() -> None:
    """All rows are taken."""
    world = Looping(random.Random(0), num_pages=240)
    *_, last = (world.submit(40) for _ in range(ROWS))
    world.until(last, 10)
    ends = list(world.runner.plans_at_ends)
    world.submit(5)
    world.until(last, 20)
    assert world.runner.plans[-1].is_loop
    assert world.runner.plans_at_ends == ends
    world.drain()


def test_a_row_that_ends_in_its_loop_is_padding_behind_it() -> None:
    """Its answer ends while the device does not know yet of the prompt that ends the loop."""
    world = Looping(Late())
    first = world.submit(12)
    world.until(first, 10)
    world.submit(5)
    world.drain()
    assert world.behind()[0] == (LaunchKind.PREFILL, [0], 1)
    assert world.runner.num_ended == 1
    again = world.submit(12)  # what is cached of the first answer is what it read
    world.drain()
    assert again.tokens == first.tokens


@pytest.mark.parametrize("constrained", [False, True])
def test_rows_go_on_behind_the_end_of_another(constrained: bool) -> None:
    """The loop is as long as the shortest answer; no row waits for the host at its end."""
    world = Looping(random.Random(0))
    world.submit(9)
    world.submit(30, constrained=constrained)
    world.drain()
    assert (LaunchKind.DECODE, [1], 0) in world.behind()
    assert world.runner.num_ended == 0


@pytest.mark.parametrize("constrained", [False, True])
def test_a_loop_begins_before_the_tokens_in_flight_are_read(constrained: bool) -> None:
    """Constraints follow them on the device."""
    world = Looping(random.Random(0))
    world.submit(30, constrained=constrained)
    world.submit(30)
    world.drain()
    assert world.runner.in_flight_at_samples[0] == 2
    assert bool(world.runner.num_advanced) == constrained


def test_nothing_is_launched_behind_a_lone_answer() -> None:
    """It ends with its loop."""
    world = Looping(random.Random(0))
    world.submit(30)
    world.drain()
    assert world.behind() == []
    assert sum(plan.is_loop for plan in world.runner.plans) == 1
