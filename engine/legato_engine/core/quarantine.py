"""Quarantine of requests that may have crashed engines: each runs alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from legato_engine.ipc.messages import Abort, Command, HoldImage, RunningAlone, Stop, Submit
from legato_engine.types import RequestKey


class Quarantine:
    """Filter of commands that holds back those that must wait for a suspect.

    While there are suspects (`Resumed.alone`), no other request starts. A suspect starts when the
    engine is idle and `announce` has notified all service processes, so a crash can be attributed
    to it. Held commands start in the order of their arrival when the last suspect has ended.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        apply: Callable[[Command], None],
        announce: Callable[[RunningAlone], None],
    ) -> None:
        self._is_idle = is_idle
        self._apply = apply
        self._announce = announce
        self._suspects: deque[Submit] = deque()
        self._held: deque[Submit | HoldImage] = deque()
        self._stopped: set[RequestKey] = set()  # suspects and held requests to stop once they start
        self._active = False

    @property
    def num_held(self) -> int:
        return len(self._suspects) + len(self._held)

    def receive(self, command: Command) -> None:
        if isinstance(command, Submit) and _is_suspect(command):
            self._suspects.append(command)
            self._active = True
        elif not self._active:
            self._apply(command)
        elif isinstance(command, Submit | HoldImage):
            self._held.append(command)
        elif not (isinstance(command, Abort | Stop) and self._end_held(command)):
            self._apply(command)

    def advance(self) -> None:
        """Start the next suspect, or the held commands, if the engine is idle."""
        if not self._active or not self._is_idle():
            return
        if self._suspects:
            suspect = self._suspects.popleft()
            resumed = suspect.request.resumed
            assert resumed is not None
            self._announce(
                RunningAlone(
                    request_id=suspect.request.request_id,
                    fingerprint=resumed.fingerprint,
                    is_last=resumed.is_last,
                )
            )
            self._start(suspect)
            return
        self._active = False
        self._announce(RunningAlone(request_id=None))
        while self._held:
            self._start(self._held.popleft())

    def _start(self, command: Submit | HoldImage) -> None:
        self._apply(command)
        if (key := _key(command)) in self._stopped:
            self._stopped.remove(key)
            self._apply(Stop(request_id=key))

    def _end_held(self, command: Abort | Stop) -> bool:
        """End a request that has not started; return whether the command applied to one."""
        key = command.request_id
        if all(_key(each) != key for each in (*self._suspects, *self._held)):
            return False
        if isinstance(command, Stop):
            self._stopped.add(key)
            return True
        self._suspects = deque(each for each in self._suspects if _key(each) != key)
        self._held = deque(each for each in self._held if _key(each) != key)
        self._stopped.discard(key)
        return True


def _is_suspect(command: Submit) -> bool:
    resumed = command.request.resumed
    return resumed is not None and resumed.alone


def _key(command: Submit | HoldImage) -> RequestKey:
    return command.request.request_id if isinstance(command, Submit) else command.request_id
