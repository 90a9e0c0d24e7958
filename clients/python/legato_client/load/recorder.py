"""A sender's clock and book: when things happened, and which of them count."""

from __future__ import annotations

import time

from legato_client.load.record import Record


class Meter:
    """Fills a record with what falls into the window, `opens` to `closes` of `time.monotonic()`."""

    def __init__(self, opens: float, closes: float) -> None:
        self.record = Record()
        self._opens = opens
        self._closes = closes

    def counts(self, moment: float) -> bool:
        """Whether a moment lies in the window."""
        return self._opens <= moment < self._closes

    def expect(self, due: float) -> Watch:
        """A request that is due, or sent, at this moment."""
        return Watch(self, due)


class Watch:
    """One request as its sender sees it."""

    __slots__ = ("_counted", "_due", "_last", "_meter")

    def __init__(self, meter: Meter, due: float) -> None:
        self._meter = meter
        self._due = due
        self._counted = meter.counts(due)
        self._last = 0.0
        if self._counted:
            meter.record.due += 1
            meter.record.lag.add(time.monotonic() - due)

    def message(self, *, answers: bool) -> None:
        """A message came; `answers` unless it only says how the request stands."""
        now = time.monotonic()
        record = self._meter.record
        if self._meter.counts(now):
            record.messages += 1
        if not (self._counted and answers):
            return
        if self._last:
            record.gap.add(now - self._last)
        else:
            record.first.add(now - self._due)
        self._last = now

    def end(self) -> None:
        """All of it came."""
        now = time.monotonic()
        record = self._meter.record
        if self._meter.counts(now):
            record.completed += 1
        if self._counted:
            record.latency.add(now - self._due)

    def fail(self, reason: str) -> None:
        """It ended otherwise; its time says nothing about those that were answered."""
        if self._counted:
            self._meter.record.errors[reason] += 1
