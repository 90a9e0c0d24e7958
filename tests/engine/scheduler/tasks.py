"""Tasks of known length."""

from tests.fakes import FakeTask

LONG_SEED = 1
"""Both kinds of task read at least 14 tokens with it, after any prefix and prompt used here."""


def long_task(*, constrained: bool = False, max_tokens: int = 14) -> FakeTask:
    """Return a task that reads `max_tokens` tokens."""
    task = FakeTask(seed=LONG_SEED, max_tokens=max_tokens, constrained=constrained)
    assert len(task.expected_tokens(2)) == max_tokens
    return task


def stopping_task(length: int, *, constrained: bool) -> FakeTask:
    """Return a task that stops by itself after `length` tokens."""
    for seed in range(10_000):
        task = FakeTask(seed=seed, max_tokens=length + 5, constrained=constrained)
        if len(task.expected_tokens(2)) == length:
            return task
    raise AssertionError("no seed stops there")
