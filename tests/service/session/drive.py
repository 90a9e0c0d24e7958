"""A core driven by hand: its workers are the test, and a ledger holds both sides to the rules."""

from __future__ import annotations

import collections
import math

from legato_engine.errors import InternalError
from legato_service.session.core import SessionCore
from legato_service.session.frame import Accepted, Dropped, Event, Frame, GoAway, Result
from legato_service.session.settings import DropReason, SessionSettings

OUTCOME = InternalError("what a task says at its end is nothing to the core")


class HandWorkers:
    """Remembers what the core asked for."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self.stopped: list[tuple[int, int]] = []

    def start(self, frame: Frame) -> None:
        """A frame runs."""
        self.running.append(frame)

    def stop(self, frame: Frame, index: int) -> None:
        """A task should end."""
        assert frame in self.running
        self.stopped.append((frame.sequence, index))

    def abort(self, frame: Frame) -> None:
        """A frame runs no more."""
        if frame in self.running:
            self.running.remove(frame)


class Ledger:
    """What the client was told, checked message by message."""

    def __init__(self, terms: SessionSettings) -> None:
        self._terms = terms
        self.sent: dict[int, Frame] = {}
        self.results: dict[int, list[int]] = collections.defaultdict(list)
        self.whole: set[int] = set()
        self.dropped: dict[int, DropReason] = {}
        self.accepted: set[int] = set()
        self.spent = 0

    def check(self, message: object, now: float) -> None:
        """The next message the client reads."""
        match message:
            case Accepted():
                assert message.sequence not in self.accepted | set(self.results) | set(self.dropped)
                self.accepted.add(message.sequence)
            case Dropped():
                assert message.sequence not in set(self.results) | set(self.dropped)
                assert message.sequence in self.sent
                self.dropped[message.sequence] = message.reason
                assert message.dropped_total == len(self.dropped)
            case Event():
                self.spent += 1
                assert message.frame.sequence not in self.dropped
                assert message.index not in self.results.get(message.frame.sequence, [])
            case Result():
                self._check_result(message, now)
            case _:
                assert isinstance(message, GoAway)

    def _check_result(self, message: Result[Frame], now: float) -> None:
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
        """At the end every frame that was sent has exactly one outcome."""
        assert self.whole | set(self.dropped) == set(self.sent)
        assert not self.whole & set(self.dropped)


class Drive:
    """A core, its workers, its client and its time."""

    def __init__(self, **terms: object) -> None:
        self.terms = SessionSettings(**terms)  # type: ignore[arg-type]  # each test's own fields
        self.runner = HandWorkers()
        self.core: SessionCore[Frame] = SessionCore(self.terms, self.runner)
        self.ledger = Ledger(self.terms)
        self.now = 100.0
        self.sequence = 0

    def send(self, *task_ids: str, age: float = 0.0, must_run: bool = False) -> int:
        """A frame arrives; its sequence."""
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
        """Tasks of a running frame end, all of them unless some are named."""
        frame = next(each for each in self.runner.running if each.sequence == sequence)
        for index in indices or range(len(frame.task_ids)):
            self.core.ended(frame, index, OUTCOME)
        if len(frame.ended) == len(frame.task_ids) and frame in self.runner.running:
            self.runner.running.remove(frame)

    def read(self) -> list[object]:
        """All that the client may be told now."""
        messages: list[object] = []
        while (message := self.core.next(self.now)) is not None:
            self.ledger.check(message, self.now)
            messages.append(message)
        return messages

    def running(self) -> list[int]:
        """What runs."""
        return [frame.sequence for frame in self.runner.running]

    def finish(self) -> None:
        """The client closes its side, what runs ends, and everything is read."""
        self.core.half_close()
        while True:
            self.read()
            if not self.runner.running:
                break
            self.end(self.runner.running[0].sequence)
        assert self.core.is_finished
        assert self.core.next_wake() == math.inf
        self.ledger.close()
