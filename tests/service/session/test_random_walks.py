"""Random sessions: both sides are counted in every order of events."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from legato_engine.errors import ClientTooSlow
from legato_engine.ipc.messages import Delta
from legato_engine.types import RequestKey, TextDelta
from legato_service.session.core import DropReason, FramePolicy

from tests.service.session.drive import Drive

SELDOM = st.sampled_from([*[False] * 19, True])  # else most walks are over at once
IDS = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3)
MUST_RUN_ENDS = {DropReason.OVERLOADED, DropReason.CANCELLED, DropReason.GOING_AWAY}


class Session(RuleBasedStateMachine):
    """One session under a hypothesis state machine."""

    @initialize(
        policy=st.sampled_from(FramePolicy),
        max_in_flight=st.integers(1, 3),
        frame_credits=st.integers(2, 4),
        max_frame_age=st.sampled_from([0.5, float("inf")]),
        response_credits=st.sampled_from([None, 1, 4]),
        max_unsent_frames=st.integers(1, 3),
    )
    def open(self, **terms):
        """Open with any settings."""
        self.drive = Drive(**terms, credit_timeout=3.0)
        self.granted = terms["response_credits"]
        self.is_over = self.is_going = self.is_closed = False

    @precondition(lambda self: not self.is_closed)
    @rule(ids=IDS, age=st.sampled_from([0.0, 0.0, 0.3, 0.6]), must_run=st.booleans())
    def send(self, ids, age, must_run):
        """Send a frame."""
        self.drive.send(*ids, age=age, must_run=must_run)

    @rule(data=st.data())
    def end(self, data):
        """End some task, stopped ones mostly first."""
        for frame in self.drive.runner.running[:1] or []:
            left = [index for index in range(len(frame.task_ids)) if index not in frame.ended]
            self.drive.end(frame.sequence, data.draw(st.sampled_from(left)))

    @rule(data=st.data())
    def output(self, data):
        """Output a word of some task, after its image was read."""
        if self.drive.runner.running:
            frame = data.draw(st.sampled_from(self.drive.runner.running))
            self.drive.core.image_ready(frame)
            word = Delta(request_id=RequestKey("r"), events=(TextDelta(text="word "),))
            self.drive.core.output(frame, len(frame.task_ids) - 1, word)

    @precondition(lambda self: not self.is_closed)
    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        """Cancel a frame, known or not."""
        self.drive.core.cancel(self.drive.sequence - back)

    @precondition(lambda self: not self.is_closed)
    @rule(task_id=st.sampled_from(["a", "", "never"]))
    def cancel_task(self, task_id):
        """Cancel a task, known or not."""
        self.drive.core.cancel_task(task_id)

    @precondition(lambda self: not self.is_closed)
    @rule(count=st.integers(1, 4))
    def grant(self, count):
        """Grant credits."""
        self.drive.core.grant(count)
        if self.granted is not None:
            self.granted += count

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.4]))
    def wait(self, seconds):
        """Let time pass."""
        self.drive.now += seconds

    @precondition(lambda self: not self.is_over)
    @rule()
    def read(self):
        """Read the messages that are due."""
        try:
            self.drive.read()
        except ClientTooSlow:
            assert self.granted is not None
            self.is_over = True

    @rule(now=SELDOM)
    def half_close(self, now):
        """Half-close."""
        if not now:
            return
        self.is_closed = True
        self.granted = None
        self.drive.core.half_close()

    @rule(now=SELDOM)
    def go_away(self, now):
        """Refuse new frames."""
        if not now:
            return
        self.is_going = True
        self.drive.core.go_away(1.0)

    @precondition(lambda self: self.is_going)
    @rule()
    def stop_all(self):
        """Stop all frames."""
        self.drive.core.stop_all()

    @invariant()
    def bounds_hold(self):
        """Neither running frames nor sent messages exceed their limits."""
        if not hasattr(self, "drive"):
            return
        assert len(self.drive.runner.running) <= self.drive.terms.max_in_flight
        if self.granted is not None:
            assert self.drive.ledger.spent <= self.granted
        for sequence, reason in self.drive.ledger.dropped.items():
            if self.drive.ledger.sent[sequence].must_run:
                assert reason in MUST_RUN_ENDS

    def teardown(self):
        """At the end, after a finish or an abort, every frame has its outcome."""
        if not hasattr(self, "drive") or self.is_over:
            return
        if self.is_going:
            self.drive.core.end_all()
            assert not self.drive.runner.running
        self.drive.finish()


TestSession = Session.TestCase
TestSession.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
