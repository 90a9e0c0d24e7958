"""The ticks of a device that does nothing."""

import pytest
from legato_engine.config import SPECULATION_OFF
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.types import DetectResult, FinishReason

from benchmarks.decode.tick import DRAFTING, TASKS, detect, ticks

STREAMS = 2
TICKS = 5
KINDS = [
    *((name, SPECULATION_OFF, 1) for name in TASKS),
    *(("free", setting, 2) for setting in DRAFTING),
]


class Launches:
    """Keeps what was committed."""

    def __init__(self):
        self.records = []

    def committed(self, record):
        """Keep a launch."""
        self.records.append(record)


@pytest.mark.parametrize(("name", "speculation", "num_tokens"), KINDS)
def test_each_tick_commits_a_token_or_more_of_each_stream(name, speculation, num_tokens):
    """What is timed are decodes of all streams."""
    seen = Launches()
    spent = ticks(
        TASKS[name],
        STREAMS,
        TICKS,
        speculation=speculation,
        num_tokens=num_tokens,
        observer=seen.committed,
    )
    assert len(spent) == TICKS
    last = seen.records[-TICKS:]
    assert [record.launch.plan.kind for record in last] == [LaunchKind.DECODE] * TICKS
    assert [record.tokens for record in last] == [STREAMS * num_tokens] * TICKS


def test_the_real_task_reports_its_boxes_with_a_confidence():
    """The host computes it, so a tick has to."""
    made = []

    def kept(max_tokens):
        made.append(detect(max_tokens))
        return made[-1]

    ticks(kept, 1, TICKS)
    result = made[0].result(FinishReason.LENGTH)
    assert isinstance(result, DetectResult)
    assert result.objects
    assert all(box.confidence for box in result.objects)
