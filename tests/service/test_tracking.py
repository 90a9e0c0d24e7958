"""Tracks of objects whose paths are known, and which box belongs to which."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_service import tracking
from legato_service.tracking import MAX_STATES, BoxState, Tracked, Tracker, TrackIds, assign, gains

# ---------------------------------------------------------------- tracker
# Tracks of objects whose paths are known.

Path = Callable[[float], Sequence[float]]
FPS = 30.0


def right(t: float) -> list[float]:
    """From left to right in two seconds."""
    return [0.1 + 0.4 * t, 0.5, 0.1, 0.2]


def left(t: float) -> list[float]:
    """The other way, crossing `right` after one second."""
    return [0.9 - 0.4 * t, 0.52, 0.1, 0.2]


def swing(t: float) -> list[float]:
    """To and fro in six seconds."""
    return [0.5 + 0.35 * math.sin(2 * math.pi * t / 6), 0.5, 0.2, 0.2]


def at_rest(*box: float) -> Path:
    """At one place."""
    return lambda t: box


def tracker(limit: int = 512, max_unseen: float = 2.0) -> Tracker:
    return Tracker(TrackIds(limit), max_unseen)


def see(following: Tracker, k: int, *paths: Path, fps: float = FPS) -> list[str]:
    """The tracks of the objects on these paths in frame k, in their order; "" for none."""
    return [each.track_id if each else "" for each in observe(following, k, *paths, fps=fps)]


def observe(following: Tracker, k: int, *paths: Path, fps: float = FPS) -> list[Tracked | None]:
    boxes = np.array([path(k / fps) for path in paths]).reshape(-1, 4)
    return following.observe(k, k / fps, boxes)


def state_of(following: Tracker, k: int, path: Path) -> BoxState:
    """The state of the only object, on this path, in frame k."""
    return only(observe(following, k, path)).state


def only(found: Sequence[Tracked | None]) -> Tracked:
    """The only object of a frame, which is tracked."""
    (tracked,) = found
    assert tracked is not None
    return tracked


@pytest.mark.parametrize("fps", [30.0, 10.0, 3.0])
def test_objects_keep_their_tracks_where_they_cross(fps):
    """Also where one is hidden at the crossing, and in whatever order they are found."""
    following, order = tracker(), random.Random(0)
    for k in range(round(2 * fps)):
        hidden = abs(k / fps - 1) < 0.2
        paths = [right] if hidden else [right, left]
        order.shuffle(paths)
        names = dict(zip(paths, see(following, k, *paths, fps=fps), strict=True))
        if k == 0:
            first = names
        assert names == {path: first[path] for path in paths}


def test_a_missed_object_is_found_again_until_its_time_is_over():
    """Seen after 1.9 s it is the same; after 2.1 s, by the frames' time, it is another one."""
    for gap, same in ((1.9, True), (2.1, False)):
        following = tracker(max_unseen=2.0)
        for k in range(30):
            (before,) = see(following, k, right)
        for k in range(30, 30 + round(gap * FPS) - 1):
            assert see(following, k) == []
        last = 29 + round(gap * FPS)
        (after,) = see(following, last, at_rest(*right(29 / FPS)))
        assert (after == before) is same


def test_the_order_of_results_changes_no_track():
    """With up to four frames in flight, late results get the tracks that they would have had."""
    paths = [right, left, swing]
    in_order, late = tracker(), tracker()
    expected = [see(in_order, k, *paths) for k in range(60)]
    ends = sorted(range(60), key=lambda k: k + 3.9 * random.Random(k).random())
    assert ends != list(range(60))
    got = {k: see(late, k, *paths) for k in ends}
    renamed = dict(zip(got[59], expected[59], strict=True))
    assert [[renamed[name] for name in got[k]] for k in range(60)] == expected


def test_a_late_measurement_counts_as_if_it_had_come_in_time():
    """The newest state is the same whichever of two frames ended first."""
    in_order, late = tracker(), tracker()
    for k in (*range(6), 6, 7, 8):
        state = state_of(in_order, k, swing)
    for k in (*range(6), 7, 6, 8):
        other = state_of(late, k, swing)
    assert np.allclose(state.mean_AK, other.mean_AK)
    assert np.allclose(state.covariance_AKK, other.covariance_AKK)


def test_a_frame_that_is_later_than_all_that_is_kept_changes_nothing():
    """It still gets the track."""
    following = tracker()
    for k in range(10, 10 + 2 * MAX_STATES):
        (name,) = see(following, k, right)
    newest = state_of(following, 40, right)
    assert see(following, 1, right) == [name]
    again = tracking.update(newest, 41 / FPS, np.array(right(41 / FPS)))
    assert np.allclose(state_of(following, 41, right).mean_AK, again.mean_AK)


def test_an_object_that_dashes_off_keeps_its_track():
    """From rest to four of its widths a second between two frames."""
    following = tracker()
    seen = []
    for k in range(60):
        at = 0.3 + 0.4 * max(0.0, k / FPS - 1)
        seen += see(following, k, at_rest(at, 0.5, 0.1, 0.1))
    assert set(seen) == {seen[0]}


def test_every_object_of_a_frame_has_a_track_of_its_own():
    """Two boxes at one place are two tracks, and names are never used again."""
    following = tracker(max_unseen=0.1)
    assert len(set(see(following, 0, right, right, left))) == 3
    later = see(following, 30, right, right, left)
    assert not set(later) & {"1", "2", "3"}


def test_the_number_of_tracks_is_limited():
    """The longest unseen goes for a new one; objects of one frame beyond the limit have none."""
    following = tracker(limit=2)
    places = [at_rest(x, 0.5, 0.05, 0.05) for x in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert see(following, 0, places[0], places[1]) == ["1", "2"]
    assert see(following, 1, places[1], places[2]) == ["2", "3"]
    assert see(following, 2, *places[1:4]) == ["2", "3", ""]
    for k, (x, y) in enumerate(itertools.permutations(range(5), 2), 3):
        see(following, k, places[x], places[y])
        assert len(following) <= 2


def test_trackers_of_one_session_share_names_and_the_limit():
    """A name is unique in its session, and a tracker that closes gives its share back."""
    ids = TrackIds(2)
    one, other = Tracker(ids, 2.0), Tracker(ids, 2.0)
    assert [*see(one, 0, right), *see(other, 0, right)] == ["1", "2"]
    assert see(other, 0, left, right) == ["", "2"]
    one.close()
    assert see(other, 1, left, right) == ["3", "2"]
    assert see(one, 1, right) == [""]


def test_a_clock_that_is_set_back_starts_anew():
    """Later frames with much earlier times are of no use with the old ones, nor hurt by them."""
    following = tracker()
    for k in range(30):
        observe(following, k, right)
    boxes = np.array([right(1.0)])
    first = only(following.observe(30, -1000.0, boxes))
    second = only(following.observe(31, -999.9, boxes))
    assert first.track_id == second.track_id == "2"
    assert len(following) == 1


def test_a_result_that_is_far_too_late_has_no_tracks():
    """Its time, which a client may invent, hurts no track."""
    following = tracker()
    for k in range(30, 60):
        (name,) = see(following, k, right)
    boxes = np.array([right(2.0)])
    assert following.observe(3, -1e9, boxes) == [None]
    assert see(following, 60, right) == [name]


def test_a_frame_without_objects_is_no_failure():
    """Neither as the first one nor later."""
    following = tracker()
    assert see(following, 0) == []
    assert see(following, 1, right) == ["1"]
    assert see(following, 2) == []


def test_motion_is_what_it_is():
    """After a second at 30 frames the estimate has the velocity, and the acceleration's sign."""
    following = tracker()
    for k in range(int(FPS) + 1):
        state = state_of(following, k, swing)
    omega = 2 * math.pi / 6
    position, velocity, acceleration = state.mean_AK[0]
    assert position == pytest.approx(swing(1.0)[0], abs=0.002)
    assert velocity == pytest.approx(0.35 * omega * math.cos(omega), abs=0.02)
    assert acceleration == pytest.approx(-0.35 * omega**2 * math.sin(omega), rel=0.3)


@pytest.mark.parametrize(("gap", "ahead"), [(1 / 30, 0.1), (0.3, 0.3), (0.5, 0.5)])
def test_the_promised_deviation_holds(gap, ahead):
    """Of swings with a detector's noise, 90 to 100 % are within two deviations after `ahead`."""
    inside = []
    rng = np.random.default_rng(0)
    for phase in np.linspace(0, 6, 9):
        following = tracker()
        for k in range(int(4 / gap)):
            time = k * gap
            truth = np.array(swing(time + phase))
            noisy = truth + rng.normal(size=4) * 0.015 * truth[[2, 3, 2, 3]]
            state = only(following.observe(k, time, noisy[None])).state
            if k < 4:
                continue
            steps = np.array([1, ahead, ahead**2 / 2])
            expected = state.mean_AK[0] @ steps
            deviation = math.hypot(*(state.deviations()[0] * steps))
            inside.append(abs(expected - swing(time + phase + ahead)[0]) <= 2 * deviation)
    assert 0.9 <= np.mean(inside) <= 1


@pytest.mark.parametrize("ahead", [-0.1, 0.0, 0.4])
def test_places_of_many_are_those_of_each(ahead):
    """What association asks of all tracks at once is what the filter would do with each."""
    states = []
    for path in (right, left):
        state = tracking.begin(0.0, np.array(path(0.0)))
        states.append(tracking.update(state, 0.1, np.array(path(0.1))))
    anew = [tracking.begin(state.time, state.box_A) for state in states]
    for ours, each in ((tracking.places, states), (tracking.places_anew, anew)):
        means, variances = ours(states, 0.1 + ahead)
        for row, state in enumerate(each):
            mean_AK, covariance_AKK = tracking.predict(state, 0.1 + ahead)
            own = tracking.measurement_variance(mean_AK[:, 0])
            assert np.allclose(means[row], mean_AK[:, 0])
            assert np.allclose(variances[row], covariance_AKK[:, 0, 0] + own)


def test_a_step_in_time_is_the_same_as_two():
    """The prediction over a gap does not depend on how it is cut."""
    state = tracking.begin(0.0, np.array(right(0.0)))
    state = tracking.update(state, 0.1, np.array(right(0.1)))
    mean_AK, covariance_AKK = tracking.predict(state, 0.9)
    halfway = tracking.BoxState(0.4, state.box_A, *tracking.predict(state, 0.4))
    again_AK, again_AKK = tracking.predict(halfway, 0.9)
    assert np.allclose(mean_AK, again_AK)
    assert np.allclose(covariance_AKK, again_AKK, rtol=0.02)


# ---------------------------------------------------------------- association
# Which box belongs to which track.


def total(gain: np.ndarray, pairs: list[tuple[int, int]]) -> float:
    """The sum of the pairs' gains."""
    return float(sum(gain[pair] for pair in pairs))


def best_total(gain: np.ndarray) -> float:
    """The greatest sum of all ways, by trying each."""
    columns = [*range(gain.shape[1]), *[-1] * gain.shape[0]]
    ways = itertools.permutations(columns, gain.shape[0])
    pairs = ([(row, column) for row, column in enumerate(way) if column >= 0] for way in ways)
    return max(total(np.maximum(gain, 0), each) for each in pairs)


matrices = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    """Gains of both signs, some of them minus infinity."""
    rng = np.random.default_rng(seed)
    gain = rng.normal(size=(rows, columns))
    return np.where(rng.random((rows, columns)) < 0.2, -np.inf, gain)


@given(matrices)
def test_pairs_gain_and_no_two_share_a_row_or_a_column(shape):
    """Every pair has a positive gain, and rows and columns are taken at most once."""
    gain = matrix(*shape)
    pairs = assign(gain)
    assert all(gain[pair] > 0 for pair in pairs)
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)


@given(st.integers(0, 2**32 - 1))
def test_two_tracks_get_the_best_pairs(seed):
    """Of all ways to give two objects to two tracks the best one is found: they do not swap."""
    gain = matrix(2, 2, seed)
    assert np.isclose(total(gain, assign(gain)), best_total(gain))


@given(st.integers(3, 5), st.integers(3, 5), st.integers(0, 2**32 - 1))
def test_no_two_tracks_gain_by_an_exchange(rows, columns, seed):
    """Of more tracks, no two would be better off with each other's objects."""
    gain = np.maximum(matrix(rows, columns, seed), 0)
    pairs = assign(gain)
    for (one, its), (other, others) in itertools.combinations(pairs, 2):
        assert gain[one, others] + gain[other, its] <= gain[one, its] + gain[other, others] + 1e-9


def test_the_greatest_gain_does_not_cost_another_row_more():
    """Greedy alone would take 10 and leave 1; 9 and 9 are better."""
    assert assign(np.array([[10.0, 9.0], [9.0, 1.0]])) == [(0, 1), (1, 0)]


def test_a_sure_track_does_not_gain_by_a_far_box():
    """A box a few deviations away is worth less than a new object, beyond the gate never."""
    track = np.array([[0.5, 0.5, 0.1, 0.1]])
    boxes = track + np.array([[0.0, 0, 0, 0], [0.03, 0, 0, 0], [0.3, 0, 0, 0]])
    near, further, far = gains(track, np.full((1, 4), 0.01**2), boxes)[0]
    assert near > further > 0 > far == -np.inf
