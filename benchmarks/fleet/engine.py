"""A simulated engine: launches of many requests, without tokens or threads."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from typing import Protocol

from benchmarks.fleet import costs as limits
from benchmarks.fleet.clock import Clock
from benchmarks.fleet.costs import EngineCosts
from benchmarks.fleet.estimates import ByRows, Estimate


class Picture:
    """An image; `num_computed` counts the engines' computations of it.

    `holder` is the index of the engine that was last sent it, -1 for none.
    """

    __slots__ = ("holder", "key", "num_computed")

    def __init__(self, key: int) -> None:
        self.key = key
        self.num_computed = 0
        self.holder = -1


class Request:
    """One question about a picture; times are virtual seconds."""

    __slots__ = (
        *("arrival", "attempts", "deadline", "picture", "predicted", "queued", "sent_new"),
        *("spent", "started", "tokens"),
    )

    def __init__(self, arrival: float, deadline: float, picture: Picture, tokens: int) -> None:
        self.arrival = arrival
        self.deadline = deadline
        self.picture = picture
        self.tokens = tokens
        self.attempts = 0
        self.sent_new = False  # its engine lacked the picture when the request was sent
        self.spent = 0.0  # seconds of the device, of all engines that ran it
        self.queued = 0.0  # when it reached the engine's queue
        self.started = 0.0  # when its prefill began
        self.predicted = 0.0  # seconds from `queued` to `started`, by the engine's estimate


class Outcomes(Protocol):
    """What engines tell of requests."""

    def answered(self, request: Request) -> None: ...

    def refused(self, request: Request) -> None: ...

    def expired(self, request: Request) -> None: ...

    def lost(self, request: Request) -> None: ...

    def computed(self, picture: Picture) -> None: ...


class SimulatedEngine:
    """Launches as `PrefillPlanner` and `DecodePlanner` make them, and an image cache.

    A launch is one event, however many requests it has. While nothing waits, all steps up to the
    end of the next answer are one event, which a new request cuts at the next step's end.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        costs: EngineCosts,
        outcomes: Outcomes,
        estimate: Estimate | None = None,
    ) -> None:
        """`estimate` is by free rows unless it is given."""
        self.index = index
        self._clock = clock
        self._costs = costs
        self._outcomes = outcomes
        self.is_up = True
        self.started = clock.now
        self.num_open = 0  # requests that were sent here and have not ended
        self.num_hits = 0
        self.busy = 0.0  # seconds in which the device ran
        self.free_at = 0.0  # when all that was sent will be done, by a router's estimate
        self.cache: OrderedDict[int, None] = OrderedDict()
        self._estimate: Estimate = estimate or ByRows()
        self._waiting: deque[Request] = deque()
        self._finishing: list[tuple[int, int, Request]] = []  # by the launch of the last token
        self._decoding: dict[Request, None] = {}  # on the host, or on the way to the device
        self._host_free = 0.0
        self._launch = 0
        self._launch_start = 0.0
        self._num_jumped = 0  # steps of decode alone in the event under way; 0: a prefill
        self._step_seconds = 0.0
        self._long = 0  # running requests with long answers
        self._number = 0
        self._version = 0  # of the event under way; others are void

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Take a request from the network."""
        clock, costs = self._clock, self._costs
        self.expect(request)
        self._host_free = max(self._host_free, clock.now) + costs.host_call
        decode = costs.decode_image if request.sent_new else 0.0
        ready = self._host_free + costs.transit_in + decode
        self._decoding[request] = None
        clock.at(ready, self._arrive, request)

    def expect(self, request: Request) -> None:
        """Count a request as a router does that sends it, whether it arrives or not."""
        self.num_open += 1
        is_new = request.picture.key not in self.cache
        request.sent_new = is_new
        cost = self._costs.request(request.tokens, new_image=is_new)
        self.free_at = max(self.free_at, self._clock.now) + cost

    def wait(self) -> float:
        """Predict the seconds until a request that is sent now would start."""
        return max(0.0, self.free_at - self._clock.now)

    def estimated_wait(self) -> float:
        """Return the seconds that AdminService.GetLoad tells."""
        return self._estimate.wait(len(self._waiting), len(self._finishing))

    def die(self, *, hangs: bool = False) -> None:
        """Lose all requests and the cache; the outcomes hear of each request.

        To a router an engine that hangs still has its requests, any other one has none.
        """
        self.is_up = False
        self._version += 1
        open_requests = [
            *self._waiting,
            *(request for *_, request in sorted(self._finishing, key=_number)),
            *self._decoding,
        ]
        if self._finishing:
            self.busy += self._clock.now - self._launch_start
        self._waiting.clear()
        self._finishing.clear()
        self._decoding.clear()
        self.cache.clear()
        if not hangs:
            self.num_open, self.free_at = 0, self._clock.now
        for request in open_requests:
            self._outcomes.lost(request)

    def _arrive(self, request: Request) -> None:
        if request not in self._decoding:
            return  # the engine died meanwhile
        del self._decoding[request]
        if len(self._waiting) >= limits.MAX_WAITING:
            self.num_open -= 1
            self._withdraw(request)
            self._outcomes.refused(request)
            return
        now, num_waiting, running = self._clock.now, len(self._waiting), len(self._finishing)
        request.queued, request.predicted = now, self.estimated_wait()
        if self._estimate.until_checked(num_waiting, running) > request.deadline - now:
            self.num_open -= 1
            self._withdraw(request)
            self._outcomes.expired(request)
            return
        self._waiting.append(request)
        if not self._finishing:
            self._next_launch()
        elif self._num_jumped > 1 and len(self._finishing) < limits.ROWS:
            self._cut_jump()

    def _withdraw(self, request: Request) -> None:
        self.free_at -= self._costs.request(request.tokens, new_image=request.sent_new)

    # ------------------------------------------------------------ launches

    def _next_launch(self) -> None:
        """Start a prefill with the decodes, or decodes alone; nothing if there is no work."""
        clock = self._clock
        prompts, tokens, images = self._admit()
        rows = len(self._finishing)
        self._launch_start = clock.now
        if not rows:
            self.free_at = clock.now
            return
        self._version += 1
        if prompts:
            self._launch += 1
            self._num_jumped = 0
            self._estimate.prefilled(clock.now, prompts, len(self._waiting))
            seconds = self._costs.launch(rows, prompts, tokens, images)
        else:
            self._step_seconds = self._costs.steps[rows]
            self._num_jumped = self._finishing[0][0] - self._launch
            self._launch += self._num_jumped
            seconds = self._step_seconds * self._num_jumped
        clock.at(clock.now + seconds, self._end_launch, self._version)

    def _admit(self) -> tuple[int, int, int]:
        """Admit waiting requests as far as one launch takes them; prompts, their tokens, images."""
        waiting, costs = self._waiting, self._costs
        prompts = tokens = images = 0
        while waiting and len(self._finishing) < limits.ROWS:
            request = waiting[0]
            if request.deadline < self._clock.now:
                waiting.popleft()
                self.num_open -= 1
                self._withdraw(request)
                self._outcomes.expired(request)
                continue
            is_new = request.picture.key not in self.cache
            question = costs.question_tokens if is_new else costs.known_question_tokens
            if prompts and not self._fits(prompts, tokens + question, images, is_new=is_new):
                break
            waiting.popleft()
            self._run(request, is_new=is_new)
            prompts, tokens, images = prompts + 1, tokens + question, images + is_new
        return prompts, tokens, images

    def _fits(self, prompts: int, tokens: int, images: int, *, is_new: bool) -> bool:
        tokens += len(self._finishing) - prompts
        allowed = limits.SHARED_PROMPTS + max(0, images - 1)
        if prompts >= allowed or tokens > limits.SHARED_PASSES * limits.ROWS:
            return False
        crowd = len(self._waiting) >= limits.CROWD and not self._long
        return not is_new or (crowd and images < limits.SHARED_IMAGES)

    def _run(self, request: Request, *, is_new: bool) -> None:
        cache, key = self.cache, request.picture.key
        if is_new:
            cache[key] = None
            if len(cache) > self._costs.num_pictures:
                cache.popitem(last=False)
            self._outcomes.computed(request.picture)
        else:
            cache.move_to_end(key)
            self.num_hits += 1
        cost = self._costs.request(request.tokens, new_image=is_new)
        self.free_at += cost - self._costs.request(request.tokens, new_image=request.sent_new)
        request.spent += cost
        request.started = self._clock.now
        self._long += request.tokens >= limits.SHORT_ANSWER
        self._number += 1
        last = self._launch + request.tokens
        heapq.heappush(self._finishing, (last, self._number, request))

    def _cut_jump(self) -> None:
        """End the steps under way with the one that runs now, so that a prefill can follow."""
        elapsed = self._clock.now - self._launch_start
        steps = min(self._num_jumped, max(1, math.ceil(elapsed / self._step_seconds)))
        self._launch -= self._num_jumped - steps
        self._num_jumped = 1
        self._version += 1
        end = max(self._clock.now, self._launch_start + steps * self._step_seconds)
        self._clock.at(end, self._end_launch, self._version)

    def _end_launch(self, version: int) -> None:
        if version != self._version:
            return
        finishing = self._finishing
        self.busy += self._clock.now - self._launch_start
        while finishing and finishing[0][0] <= self._launch:
            *_, request = heapq.heappop(finishing)
            self._long -= request.tokens >= limits.SHORT_ANSWER
            self.num_open -= 1
            self._estimate.completed(self._clock.now - request.started)
            self._clock.at(
                self._clock.now + self._costs.transit_out, self._outcomes.answered, request
            )
        self._next_launch()


def _number(entry: tuple[int, int, Request]) -> int:
    return entry[1]
