"""The number of servers for a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from legato_ray.autoscaling import QueueSecondsPolicy, replicas_needed


@pytest.mark.parametrize(
    ("queues", "busy", "current", "needed"),
    [
        ([0.0], [0.0], 1, 1),  # idle
        ([3.0], [1.0], 1, 3),  # three seconds of work, one is accepted
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 3, 3),  # as accepted
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 3, 3),  # full without a queue: kept, none added
        ([0.0, 0.0, 0.0], [0.3, 0.3, 0.3], 3, 2),  # two have room for what runs
        ([0.0, 0.0, 0.0], [0.0, 0.1, 0.0], 3, 1),
    ],
)
def test_what_a_load_needs(
    queues: list[float], busy: list[float], current: int, needed: int
) -> None:
    """Queues add servers; only idle rows let one go."""
    found = replicas_needed(
        dict(enumerate(queues)), dict(enumerate(busy)), target=1.0, current=current
    )
    assert found == needed


def context(metrics: Any) -> Any:
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)


def test_without_figures_nothing_changes() -> None:
    """Replicas that have just started say nothing yet."""
    policy = QueueSecondsPolicy(target=0.5)
    assert policy(context({}))[0] == 2
    assert policy(context({"queue_seconds": {}}))[0] == 2


def test_the_policy_reads_what_replicas_record() -> None:
    """Queue seconds beyond the target ask for more."""
    metrics = {"queue_seconds": {"a": 1.0, "b": 1.0}, "busy": {"a": 1.0, "b": 1.0}}
    assert QueueSecondsPolicy(target=0.5)(context(metrics))[0] == 4
