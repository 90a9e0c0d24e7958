"""The tracks of one task's objects, over frames whose results may come in any order."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np

from legato_service.tracking import association, box_filter
from legato_service.tracking.box_filter import Array, BoxState

MAX_STATES = 8
"""Kept of a track, so that the result of an older frame can be put in its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracked:
    """An object of a frame: its track, and its state when the frame was captured."""

    track_id: str
    state: BoxState


class TrackIds:
    """Names the tracks of a session, of which at most `limit` are alive."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._numbers = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        return self._left == 0

    def take(self) -> str:
        """A name that was never used. Not when `is_empty`."""
        assert self._left > 0, "every track is alive"
        self._left -= 1
        return str(next(self._numbers))

    def give_back(self, count: int) -> None:
        self._left += count


class Track:
    """One object: its last states by time."""

    def __init__(self, track_id: str, first: BoxState) -> None:
        self.track_id = track_id
        self._states = [first]

    @property
    def last_seen(self) -> float:
        return self._states[-1].time

    def nearest(self, time: float) -> BoxState:
        """The last state up to `time`, or else the first one after it."""
        return self._states[max(self._index(time) - 1, 0)]

    def add(self, time: float, box_A: Array, sudden: bool) -> BoxState:
        """Take in a measurement, and return the state at its time.

        If it is older than others, these follow it anew. If it is older than all that are kept, it
        changes nothing.
        """
        index = self._index(time)
        if index == 0:
            state = box_filter.update(self._states[0], time, box_A)
            if len(self._states) < MAX_STATES:
                self._states.insert(0, box_filter.begin(time, box_A))
                self._follow(1)
            return state
        state = box_filter.update(self._states[index - 1], time, box_A, sudden=sudden)
        self._states.insert(index, state)
        self._follow(index + 1)
        del self._states[:-MAX_STATES]
        return state

    def _follow(self, first: int) -> None:
        """Compute the states from this index on again, each from the one before."""
        for index in range(first, len(self._states)):
            old = self._states[index]
            self._states[index] = box_filter.update(
                self._states[index - 1], old.time, old.box_A, sudden=old.sudden
            )

    def _index(self, time: float) -> int:
        return bisect.bisect_right(self._states, time, key=lambda state: state.time)


class Tracker:
    """The tracks of one task. Times are those of the frames, in seconds on any clock.

    `max_unseen` is how long a track waits for its object.
    """

    def __init__(self, ids: TrackIds, max_unseen: float) -> None:
        self.max_unseen = max_unseen
        self._ids = ids
        self._tracks: list[Track] = []
        self._newest = (-1, -math.inf)  # sequence and time
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tracks)

    def observe(self, sequence: int, time: float, boxes_DA: Array) -> list[Tracked | None]:
        """Follow the objects of a frame; None for each that is one too many for `TrackIds`.

        A result so late that all tracks of its time may have ended has none either.
        """
        self._expire(sequence, time)
        if self._is_closed or time < self._newest[1] - self.max_unseen:
            return [None] * len(boxes_DA)
        found: list[Tracked | None] = [None] * len(boxes_DA)
        seen: set[Track] = set()
        for track, index, sudden in self._pairs(time, boxes_DA):
            found[index] = Tracked(track.track_id, track.add(time, boxes_DA[index], sudden))
            seen.add(track)
        for index, box_A in enumerate(boxes_DA):
            if found[index] is None and self._make_room(seen):
                state = box_filter.begin(time, box_A)
                track = Track(self._ids.take(), state)
                found[index] = Tracked(track.track_id, state)
                self._tracks.append(track)
                seen.add(track)
        return found

    def close(self) -> None:
        """Forget all tracks; what is observed later has none."""
        self._forget(self._tracks)
        self._is_closed = True

    def _expire(self, sequence: int, time: float) -> None:
        """A later frame with a much earlier time means that its clock was set: all begins anew."""
        last_sequence, last_time = self._newest
        if sequence > last_sequence and time < last_time - self.max_unseen:
            self._forget(self._tracks)
            last_time = time
        newest = max(time, last_time)
        self._newest = max(sequence, last_sequence), newest
        self._forget([each for each in self._tracks if newest - each.last_seen > self.max_unseen])

    def _pairs(self, time: float, boxes_DA: Array) -> list[tuple[Track, int, bool]]:
        """Tracks with the indices of their boxes, and whether they moved there suddenly."""
        if not self._tracks or len(boxes_DA) == 0:
            return []
        states = [track.nearest(time) for track in self._tracks]
        smooth_TD = association.gains(*box_filter.places(states, time), boxes_DA)
        anew_TD = association.gains(*box_filter.places_anew(states, time), boxes_DA)
        sudden_TD = anew_TD - association.SUDDEN
        pairs = association.assign(np.maximum(smooth_TD, sudden_TD))
        return [(self._tracks[t], d, bool(sudden_TD[t, d] > smooth_TD[t, d])) for t, d in pairs]

    def _make_room(self, seen: Collection[Track]) -> bool:
        """Give up the track that was unseen for longest if there are too many."""
        if self._ids.is_empty:
            unseen = [track for track in self._tracks if track not in seen]
            self._forget(sorted(unseen, key=lambda track: track.last_seen)[:1])
        return not self._ids.is_empty

    def _forget(self, tracks: Sequence[Track]) -> None:
        gone = set(tracks)
        self._tracks = [track for track in self._tracks if track not in gone]
        self._ids.give_back(len(gone))
