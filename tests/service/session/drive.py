"""A core driven by hand: the test is its runner, and a ledger checks both sides."""

from __future__ import annotations

import collections
import math

from legato_engine.errors import InternalError
from legato_service.session.core import (
    Accepted,
    Dropped,
    DropReason,
    Frame,
    FrameOutcome,
    FrameOutput,
    GoAwayNotice,
    SessionCore,
    SessionSettings,
)

OUTCOME = InternalError("what a task says at its end is nothing to the core")


class ManualRunner:
    """Records the core's orders."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self.stopped: list[tuple[int, int]] = []

    def start(self, frame: Frame) -> None:
        """Record a frame that runs."""
        self.running.append(frame)

    def stop(self, frame: Frame, index: int) -> None:
        """Record a task that should end."""
        assert frame in self.running
        self.stopped.append((frame.sequence, index))

    def abort(self, frame: Frame) -> None:
        """Remove a frame."""
        if frame in self.running:
            self.running.remove(frame)


class Ledger:
    """Checks the messages to the client one by one."""

    def __init__(self, terms: SessionSettings) -> None:
        self._terms = terms
        self.sent: dict[int, Frame] = {}
        self.results: dict[int, list[int]] = collections.defaultdict(list)
        self.whole: set[int] = set()
        self.dropped: dict[int, DropReason] = {}
        self.accepted: set[int] = set()
        self.spent = 0

    def check(self, message: object, now: float) -> None:
        """Check the next message."""
        match message:
            case Accepted():
                assert message.sequence not in self.accepted | set(self.results) | set(self.dropped)
                self.accepted.add(message.sequence)
            case Dropped():
                assert message.sequence not in set(self.results) | set(self.dropped)
                assert message.sequence in self.sent
                self.dropped[message.sequence] = message.reason
                assert message.dropped_total == len(self.dropped)
            case FrameOutput():
                self.spent += 1
                assert message.frame.sequence not in self.dropped
                assert message.index not in self.results.get(message.frame.sequence, [])
            case FrameOutcome():
                self._check_result(message, now)
            case _:
                assert isinstance(message, GoAwayNotice)

    def _check_result(self, message: FrameOutcome[Frame], now: float) -> None:
        frame, num_sent = message.frame, self.results[message.frame.sequence]
        self.spent += 1
        assert frame.sequence not in self.dropped
        assert message.index not in num_sent
        if not num_sent and not frame.must_run:
            assert now - frame.captured_at < self._terms.max_frame_age
        num_sent.append(message.index)
        assert message.last == (len(num_sent) == len(frame.task_ids))
        if message.last:
            self.whole.add(frame.sequence)

    def close(self) -> None:
        """Check that every frame has exactly one outcome."""
        assert self.whole | set(self.dropped) == set(self.sent)
        assert not self.whole & set(self.dropped)


class Drive:
    """A core with its runner, its client and its clock."""

    def __init__(self, **terms: object) -> None:
        self.terms = SessionSettings(**terms)  # type: ignore[arg-type]  # each test's own fields
        self.runner = ManualRunner()
        self.core: SessionCore[Frame] = SessionCore(self.terms, self.runner)
        self.ledger = Ledger(self.terms)
        self.now = 100.0
        self.sequence = 0

    def send(self, *task_ids: str, age: float = 0.0, must_run: bool = False) -> int:
        """Send a frame; return its sequence number."""
        self.sequence += 1
        frame = Frame(
            sequence=self.sequence,
            task_ids=task_ids or ("t",),
            captured_at=self.now - age,
            must_run=must_run,
        )
        self.ledger.sent[frame.sequence] = frame
        self.core.receive(frame, self.now)
        return frame.sequence

    def end(self, sequence: int, *indices: int) -> None:
        """End tasks of a running frame, by default all."""
        frame = next(each for each in self.runner.running if each.sequence == sequence)
        for index in indices or range(len(frame.task_ids)):
            self.core.ended(frame, index, OUTCOME)
        if len(frame.ended) == len(frame.task_ids) and frame in self.runner.running:
            self.runner.running.remove(frame)

    def read(self) -> list[object]:
        """Read all messages that are due."""
        messages: list[object] = []
        while (message := self.core.next(self.now)) is not None:
            self.ledger.check(message, self.now)
            messages.append(message)
        return messages

    def running(self) -> list[int]:
        """The running frames."""
        return [frame.sequence for frame in self.runner.running]

    def finish(self) -> None:
        """Half-close, end all frames, and read everything."""
        self.core.half_close()
        while True:
            self.read()
            if not self.runner.running:
                break
            self.end(self.runner.running[0].sequence)
        assert self.core.is_finished
        assert self.core.next_wake() == math.inf
        self.ledger.close()
