"""How many servers a load needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUE_SECONDS = "queue_seconds"
"""How long a request arriving now would wait at a server, as predicted."""
BUSY = "busy"
"""Running requests of a server, as a share of those that can run."""
MOST_BUSY = 0.7
"""Mean share of busy rows up to which a server may be taken away."""


def replicas_needed(
    queue_seconds: Mapping[Any, float], busy: Mapping[Any, float], *, target: float, current: int
) -> int:
    """At least 1.

    Arguments:
        queue_seconds: Predicted wait of a new request at each server, in seconds.
        busy: Share of the rows of each server that run, 0 to 1.
        target: Wait in seconds that is accepted.
        current: Servers now. Busy servers without a queue are kept, and none is added for them.
    """
    for_queues = math.ceil(sum(queue_seconds.values()) / target - 1e-9)
    for_running = math.ceil(sum(busy.values()) / MOST_BUSY - 1e-9)
    return max(1, for_queues, min(for_running, current))


class QueueSecondsPolicy:
    """Ray Serve's policy: the number of replicas that the predicted queues need.

    Ray applies bounds and delays of the deployment's `autoscaling_config` to it.
    """

    def __init__(self, target: float) -> None:
        """`target` is in seconds."""
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        if not metrics.get(QUEUE_SECONDS):  # no replica has said anything yet
            return context.target_num_replicas, {}
        needed = replicas_needed(
            metrics[QUEUE_SECONDS],
            metrics.get(BUSY, {}),
            target=self._target,
            current=context.target_num_replicas,
        )
        return needed, {}
