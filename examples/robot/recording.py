"""What happened in a session, and whether every frame was accounted for.

All times are seconds from the start of the clip, on one monotonic clock.
"""

from __future__ import annotations

import collections
import dataclasses

from legato_client import Box, TrackNow


@dataclasses.dataclass(frozen=True)
class Sent:
    """A frame that was sent; `captured` is when the camera's clock took it."""

    sequence: int
    captured: float
    sent: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """One task's end on one frame; `error` is the status' message, empty if all went well.

    `track_ids` name the objects of the boxes. `tracks` is where the client expected the noun's
    objects when the answer arrived, and `told_age` the age in seconds at which the server says that
    it sent the answer.
    """

    sequence: int
    noun: str
    boxes: tuple[Box, ...]
    arrived: float
    is_last: bool
    error: str = ""
    track_ids: tuple[str, ...] = ()
    tracks: tuple[TrackNow, ...] = ()
    told_age: float | None = None


@dataclasses.dataclass(frozen=True)
class Drop:
    """A frame that gets no answer; `total` is how many the server says it has dropped."""

    sequence: int
    reason: str
    arrived: float
    total: int


@dataclasses.dataclass(frozen=True)
class Look:
    """Where the client expected all objects at a moment of the clip."""

    time: float
    tracks: tuple[TrackNow, ...]


@dataclasses.dataclass
class Recording:
    """Everything that one session's two sides said to each other.

    `num_frames` is the clip's length; `left_out` are the frames that were not sent, as the server
    had granted no credit for them; `failure` is why the session ended early, if it did.
    """

    nouns: tuple[str, ...]
    num_frames: int
    sent: list[Sent] = dataclasses.field(default_factory=list)
    answers: list[Answer] = dataclasses.field(default_factory=list)
    drops: list[Drop] = dataclasses.field(default_factory=list)
    looks: list[Look] = dataclasses.field(default_factory=list)
    left_out: list[int] = dataclasses.field(default_factory=list)
    failure: str = ""

    def captured(self) -> dict[int, float]:
        """When each frame that was sent was taken."""
        return {frame.sequence: frame.captured for frame in self.sent}

    def answered(self) -> dict[int, list[Answer]]:
        """Group the answers by frame, in the order of their arrival."""
        frames: dict[int, list[Answer]] = collections.defaultdict(list)
        for answer in self.answers:
            frames[answer.sequence].append(answer)
        return frames

    def reasons(self) -> dict[str, int]:
        """How many frames were dropped, by reason, in the order of the reasons' names."""
        return dict(sorted(collections.Counter(drop.reason for drop in self.drops).items()))

    def faults(self) -> list[str]:
        """Every breach of the session's promises, one line each; none if both books agree."""
        return [*self._frame_faults(), *self._count_faults()]

    def _frame_faults(self) -> list[str]:
        """Each frame sent has one answer for each task or one drop; no other frame has anything."""
        lines = []
        answered = self.answered()
        dropped = collections.Counter(drop.sequence for drop in self.drops)
        sent = [frame.sequence for frame in self.sent]
        for sequence in sent:
            nouns = [answer.noun for answer in answered.get(sequence, [])]
            whole = sorted(nouns) == sorted(self.nouns) and not dropped[sequence]
            if not whole and (nouns or dropped[sequence] != 1):
                lines.append(f"frame {sequence}: answers {nouns}, {dropped[sequence]} drops")
        for sequence, answers in answered.items():
            if [answer.is_last for answer in answers] != [False] * (len(answers) - 1) + [True]:
                lines.append(f"frame {sequence}: its last answer is not marked as the last")
        strangers = sorted({*answered, *dropped} - set(sent))
        return lines + [f"frame {sequence}: never sent" for sequence in strangers]

    def _count_faults(self) -> list[str]:
        """Compare the server's counts with those made here; list the differences and a bad end."""
        totals = [drop.total for drop in self.drops]
        lines = [self.failure] if self.failure else []
        if missing := self.num_frames - len(self.sent) - len(self.left_out):
            lines.append(f"the session was over {missing} frames before the clip was")
        if totals != list(range(1, len(totals) + 1)):
            lines.append(f"the server's count of drops is {totals[-1]}, {len(totals)} arrived")
        return lines
