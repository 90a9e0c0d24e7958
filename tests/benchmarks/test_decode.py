"""Benchmarks of decode steps: the KV cache, ticks and rounded weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from legato_client import Box
from legato_client.calibration.scored import LabelledImage, Scored
from legato_engine.config import SPECULATION_OFF
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.types import DetectOutput, FinishReason

from benchmarks.cpu import rounding
from benchmarks.decode import kv
from benchmarks.decode.tick import DRAFTING, TASKS, detect, ticks
from benchmarks.record import ALLOW_DIRTY

# ---------------------------------------------------------------- tick
# The ticks of a device that does nothing.

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
    assert isinstance(result, DetectOutput)
    assert result.objects
    assert all(box.confidence for box in result.objects)


# ---------------------------------------------------------------- kv
# The record of the KV cache benchmark, from a run of the smallest model.

MODEL = ("--model", "random-tiny", "--device", "cpu", "--threads", "1", "--repeats", "1")


def test_what_is_found_comes_sooner(tmp_path, monkeypatch, capsys):
    """Followers find what their leader computed, words or image, and pages come back whole."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    assert kv.main([*MODEL, "--shared", "120", "--positions", "150"]) == 0
    figures = json.loads((tmp_path / "kv.json").read_text())["figures"]
    words, picture = figures["sharing"]
    assert words["positions"] >= 120
    assert picture["positions"] > 1
    assert figures["swapping"]["megabytes"] > 0
    assert all(value > 0 for value in figures["swapping"].values())


# ---------------------------------------------------------------- rounding
# F1 of a form of the weights, and how it differs from that of another.

BOX = Box(0.1, 0.1, 0.2, 0.2)


def picture(number, **boxes):
    return LabelledImage(Path(), number, boxes)


def found(number, *, right):
    return Scored("detect", number, "cup", BOX, (), right)


def test_counts_are_by_picture():
    """A thing that no picture shows counts only where the model finds it."""
    pictures = [picture(7, cup=(BOX, BOX), pen=()), picture(3, cup=(BOX,))]
    counts = rounding.counted(
        pictures, [found(7, right=True), found(7, right=False), found(3, right=True)]
    )
    assert counts.tolist() == [[1, 2, 2], [1, 1, 1]]
    assert rounding.f1(counts) == pytest.approx(2 * 2 / (3 + 3))


def test_a_difference_is_taken_picture_by_picture():
    """Two forms that fail in the same pictures do not differ, however much pictures do."""
    reference = np.array([[9, 9, 9], [0, 9, 9], [5, 9, 9], [9, 9, 9]] * 20)
    same = rounding.difference(reference.copy(), reference, seed=1)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    worse = reference.copy()
    worse[::2, 0] -= 1
    less = rounding.difference(worse, reference, seed=1)
    assert less.low < less.value < less.high < 0.0
    assert less.value == pytest.approx(-0.5 / 9)


def test_the_table_compares_with_the_first_form():
    """It has a row for each form, and the first has nothing to be compared with."""
    counts = {"float32": np.array([[1, 1, 1]]), "int8": np.array([[1, 2, 1]])}
    less = {"int8": rounding.Difference(-0.3333, -0.5, -0.1)}
    rows = rounding.table(counts, less).splitlines()
    assert rows[-2] == "| float32 | 1.0000 | - | 1.0000 | 1.0000 |"
    assert rows[-1] == "| int8 | 0.6667 | -0.3333 (-0.5000 to -0.1000) | 1.0000 | 0.5000 |"
