"""Clips, loads and scores of the benchmark of trackers."""

from __future__ import annotations

import numpy as np
import pytest
from legato_service import tracking

from benchmarks.tracking import (
    MOTIONS,
    Frame,
    Load,
    clip,
    contender,
    extrapolated,
    follower,
    overlaps,
)

FRAMES = clip(MOTIONS[0], 0, 4.0, 30, missed=0.0, extra=0.0)


def test_a_clip_repeats_and_has_its_share_of_mistakes():
    """The same seed is the same clip; what is missed and what is too much is as asked."""
    again = clip(MOTIONS[0], 0, 4.0, 30, missed=0.0, extra=0.0)
    assert all(np.array_equal(a.found_DA, b.found_DA) for a, b in zip(FRAMES, again, strict=True))
    assert all(len(frame.found_DA) == len(frame.truth) == 4 for frame in FRAMES)
    worse = clip(MOTIONS[0], 0, 10.0, 30, missed=0.5, extra=1.0)
    found = np.mean([len(frame.found_DA) for frame in worse])
    assert found == pytest.approx(0.5 * 4 + 1.0, abs=0.3)


def test_the_newest_frame_is_answered_and_the_others_are_dropped():
    """A server that takes three frames' time answers each third one, in order."""
    answered = Load("", 0.1).answered(FRAMES, 0)
    steps = np.diff([frame.sequence for frame in answered])
    assert steps.mean() == pytest.approx(3, abs=0.2)
    assert (
        steps.max() <= 4
    )  # a frame that is due when the server is free may count as just too late
    everyone = Load("", 0.001).answered(FRAMES, 0)
    assert [frame.sequence for frame in everyone] == [frame.sequence for frame in FRAMES]


def test_frames_in_flight_overtake_each_other():
    """No frame is answered twice, and some come late."""
    sequences = [frame.sequence for frame in Load("", 0.06, 8).answered(FRAMES, 0)]
    assert len(set(sequences)) == len(sequences) > 100
    assert sequences != sorted(sequences)


def test_overlaps_are_intersections_over_unions():
    """Of equal boxes 1, of half-shared ones a third, of boxes apart 0."""
    box = np.array([0.5, 0.5, 0.2, 0.2])
    others = np.array([box, [0.6, 0.5, 0.2, 0.2], [0.9, 0.5, 0.2, 0.2], [0.5, 0.5, 0.1, 0.1]])
    assert np.allclose(overlaps([box], others), [[1, 1 / 3, 0, 1 / 4]])


def test_acceleration_is_worth_something_and_comes_back():
    """The exchanged part of a contender changes the figures inside of the block only."""
    fading = tracking.FADING
    every = [frame for frame in FRAMES if frame.sequence % 10 == 1]
    own = extrapolated(every, FRAMES, 10 / 30)
    with contender("ours, velocity"):
        assert fading != tracking.FADING
        plain = extrapolated(every, FRAMES, 10 / 30)
    assert fading == tracking.FADING
    assert extrapolated(every, FRAMES, 10 / 30) == own
    assert own["extrapolated"] > plain["extrapolated"] > own["as_found"]


def test_followers_name_the_boxes_in_their_order():
    """One name a box, the same for the same object."""
    with contender("ours"):
        following = follower("ours", 30)
        names = [following.observe(frame) for frame in (FRAMES[0], _turned(FRAMES[0], 2))]
    assert names[1] == names[0][::-1]


def _turned(frame: Frame, sequence: int) -> Frame:
    """The same boxes a moment later, in the opposite order."""
    return Frame(sequence, frame.time + 0.01, frame.truth, frame.found_DA[::-1])
