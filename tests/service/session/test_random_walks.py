"""Random sessions: both sides are counted, whatever happens in whatever order."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from legato_engine.core import RequestKey, TextDelta
from legato_engine.errors import ClientTooSlow
from legato_engine.ipc.messages import Delta
from legato_service.session.terms import Cause, Policy

from tests.service.session.drive import Drive

SELDOM = st.sampled_from([*[False] * 19, True])  # else most walks are over at once
IDS = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3)
MUST_RUN_ENDS = {Cause.OVERLOADED, Cause.CANCELLED, Cause.GOING_AWAY}


class Session(RuleBasedStateMachine):
    """One session under hypothesis' hands."""

    @initialize(
        policy=st.sampled_from(Policy),
        max_in_flight=st.integers(1, 3),
        frame_credits=st.integers(2, 4),
        max_frame_age=st.sampled_from([0.5, float("inf")]),
        response_credits=st.sampled_from([None, 1, 4]),
        ring=st.integers(1, 3),
    )
    def open(self, **terms):
        """Any terms."""
        self.drive = Drive(**terms, patience=3.0)
        self.granted = terms["response_credits"]
        self.is_over = self.is_going = self.is_closed = False

    @precondition(lambda self: not self.is_closed)
    @rule(ids=IDS, age=st.sampled_from([0.0, 0.0, 0.3, 0.6]), must_run=st.booleans())
    def send(self, ids, age, must_run):
        """The client sends a frame."""
        self.drive.send(*ids, age=age, must_run=must_run)

    @rule(data=st.data())
    def end(self, data):
        """Some task ends, stopped ones mostly first."""
        for frame in self.drive.workers.running[:1] or []:
            left = [index for index in range(len(frame.task_ids)) if index not in frame.ended]
            self.drive.end(frame.sequence, data.draw(st.sampled_from(left)))

    @rule(data=st.data())
    def report(self, data):
        """Some task says a word, and its picture was taken in."""
        if self.drive.workers.running:
            frame = data.draw(st.sampled_from(self.drive.workers.running))
            self.drive.core.taken(frame)
            word = Delta(request_id=RequestKey("r"), events=(TextDelta(text="word "),))
            self.drive.core.report(frame, len(frame.task_ids) - 1, word)

    @precondition(lambda self: not self.is_closed)
    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        """The client cancels a frame, known or not."""
        self.drive.core.cancel(self.drive.sequence - back)

    @precondition(lambda self: not self.is_closed)
    @rule(task_id=st.sampled_from(["a", "", "never"]))
    def cancel_task(self, task_id):
        """The client cancels a task, known or not."""
        self.drive.core.cancel_task(task_id)

    @precondition(lambda self: not self.is_closed)
    @rule(count=st.integers(1, 4))
    def grant(self, count):
        """The client reads on."""
        self.drive.core.grant(count)
        if self.granted is not None:
            self.granted += count

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.4]))
    def wait(self, seconds):
        """Time goes by."""
        self.drive.now += seconds

    @precondition(lambda self: not self.is_over)
    @rule()
    def read(self):
        """The writer writes what it may."""
        try:
            self.drive.read()
        except ClientTooSlow:
            assert self.granted is not None
            self.is_over = True

    @rule(now=SELDOM)
    def half_close(self, now):
        """The client has said all."""
        if not now:
            return
        self.is_closed = True
        self.granted = None
        self.drive.core.half_close()

    @rule(now=SELDOM)
    def go_away(self, now):
        """The server takes no more."""
        if not now:
            return
        self.is_going = True
        self.drive.core.go_away(1.0)

    @precondition(lambda self: self.is_going)
    @rule()
    def wind_up(self):
        """The time is nearly over."""
        self.drive.core.wind_up()

    @invariant()
    def bounds_hold(self):
        """No more runs than was agreed, and no more was told than was granted."""
        if not hasattr(self, "drive"):
            return
        assert len(self.drive.workers.running) <= self.drive.terms.max_in_flight
        if self.granted is not None:
            assert self.drive.ledger.spent <= self.granted
        for sequence, cause in self.drive.ledger.dropped.items():
            if self.drive.ledger.sent[sequence].must_run:
                assert cause in MUST_RUN_ENDS

    def teardown(self):
        """At the end, after a finish or a cut, the books balance."""
        if not hasattr(self, "drive") or self.is_over:
            return
        if self.is_going:
            self.drive.core.cut()
            assert not self.drive.workers.running
        self.drive.finish()


TestSession = Session.TestCase
TestSession.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
