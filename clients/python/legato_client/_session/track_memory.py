"""What a session's results said about tracked objects."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from legato.v1 import task_pb2

from legato_client._values.results import Detection, DetectResult, FrameStamp
from legato_client._values.session import FrameResult
from legato_client._values.tracks import TrackNow

DEFAULT_UNSEEN = 2.0  # seconds, as the contract says of `Tracking.max_unseen`
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tracked object in the newest frame that it was found in."""

    found: Detection
    task_id: str
    sequence: int
    captured_ns: int


class TrackMemory:
    """The newest state of each track, until its object was not found for `Tracking.max_unseen`.

    Times are on the clock of the stamps' capture times. A frame whose stamp has none counts as
    captured when it is sent, by the wall clock.
    """

    def __init__(self, standing_tasks: Iterable[task_pb2.Task]) -> None:
        self._seen: dict[str, _Seen] = {}  # by track
        self._sent_ns: dict[int, int] = {}  # of open frames without a capture time, by sequence
        self.use(standing_tasks)

    def use(self, standing_tasks: Iterable[task_pb2.Task]) -> None:
        """Forget the tracks of all other tasks."""
        self._max_unseen_ns = {
            (task.task_id, task.detect.object): _max_unseen_ns(task.detect.tracking)
            for task in standing_tasks
            if task.detect.HasField("tracking")
        }
        self._seen = {key: each for key, each in self._seen.items() if self._follows(each)}

    def sent(self, sequence: int, stamp: FrameStamp) -> None:
        if stamp.capture_time_ns is None and self._max_unseen_ns:
            self._sent_ns[sequence] = time.time_ns()

    def settled(self, sequence: int) -> None:
        """No more results of this frame will come."""
        self._sent_ns.pop(sequence, None)

    def received(self, result: FrameResult) -> None:
        """To be called before `settled`."""
        captured_ns = result.stamp.capture_time_ns
        if captured_ns is None:
            captured_ns = self._sent_ns.get(result.sequence)
        if captured_ns is None or not isinstance(result.outcome, DetectResult):
            return
        for found in result.outcome.objects:
            each = _Seen(found, result.task_id, result.sequence, captured_ns)
            if found.motion is not None and self._follows(each):
                self._keep(each)
        self._seen = {
            key: each for key, each in self._seen.items() if self._lives(each, captured_ns)
        }

    def now(self, at_ns: int | None) -> tuple[TrackNow, ...]:
        at_ns = time.time_ns() if at_ns is None else at_ns
        return tuple(_extrapolated(e, at_ns) for e in self._seen.values() if self._lives(e, at_ns))

    def _keep(self, seen: _Seen) -> None:
        old = self._seen.get(seen.found.track_id)
        if old is None or old.captured_ns <= seen.captured_ns:
            self._seen[seen.found.track_id] = seen

    def _follows(self, seen: _Seen) -> bool:
        return (seen.task_id, seen.found.label) in self._max_unseen_ns

    def _lives(self, seen: _Seen, at_ns: int) -> bool:
        """Also false far ahead of its time: the clock was set back since."""
        limit = self._max_unseen_ns[seen.task_id, seen.found.label]
        return abs(at_ns - seen.captured_ns) <= limit


def _extrapolated(seen: _Seen, at_ns: int) -> TrackNow:
    motion = seen.found.motion
    assert motion is not None, "only tracked objects are kept"
    age = max(at_ns - seen.captured_ns, 0) / _NS
    return TrackNow(
        axes=motion.after(age),
        deviation=motion.deviation_after(age),
        age=age,
        last=seen.found,
        sequence=seen.sequence,
        task_id=seen.task_id,
    )


def _max_unseen_ns(tracking: task_pb2.Tracking) -> int:
    if tracking.HasField("max_unseen"):
        return tracking.max_unseen.ToNanoseconds()
    return round(DEFAULT_UNSEEN * _NS)
