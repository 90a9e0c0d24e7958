"""Tasks whose ends are known."""

from tests.fakes import FakeTask

LONG_SEED = 1
"""Both kinds of task read at least 14 tokens with it, behind any prefix and prompt used here."""


def long_task(*, constrained: bool = False, max_tokens: int = 14) -> FakeTask:
    """A task that runs to `max_tokens`."""
    task = FakeTask(seed=LONG_SEED, max_tokens=max_tokens, constrained=constrained)
    assert len(task.expected_tokens(2)) == max_tokens
    return task


def stopping_task(length: int, *, constrained: bool) -> FakeTask:
    """A task that stops by itself at its token number `length`."""
    for seed in range(10_000):
        task = FakeTask(seed=seed, max_tokens=length + 5, constrained=constrained)
        if len(task.expected_tokens(2)) == length:
            return task
    raise AssertionError("no seed stops there")
