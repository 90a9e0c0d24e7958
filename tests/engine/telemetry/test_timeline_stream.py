"""The timeline as it happens."""

from legato_engine.scheduler.batch import LaunchKind
from legato_engine.telemetry import LANES, PERIOD, SpanMaker, StepStats, TimelineStream

from tests.engine.telemetry.steps import MS, make_step


class FakeWatchers:
    """Keeps the batches."""

    def __init__(self, watched):
        self.watched = watched
        self.batches = []

    def send_timeline(self, batch):
        self.batches.append(batch)


def streamed(watchers, count):
    """Return a stream, and the steps that it got."""
    stats = StepStats()
    stream = TimelineStream(watchers, stats)
    steps = [make_step(i) for i in range(count)]
    for step in steps:
        stats.add(step)
        stream.add(step)
    return stream, steps


def test_batches_hold_a_period_of_launches_and_lose_none():
    """Steps of 10 ms come in batches of one period; the rest comes with a flush."""
    watchers = FakeWatchers(watched=True)
    stream, steps = streamed(watchers, 24)
    sent = len(watchers.batches)
    assert 24 * 10 / (PERIOD * 1000) - 2 <= sent <= 24 * 10 / (PERIOD * 1000) + 2
    stream.flush()
    spans = [span for batch in watchers.batches for span in batch.spans]
    assert [s.launch for s in spans if s.name == "forward"] == list(range(24))
    assert {span.lane for span in spans} == set(LANES)
    forwards = [(s.start, s.duration) for s in spans if s.name == "forward"]
    assert forwards == [(step.times.forward_start, 6 * MS) for step in steps]
    assert watchers.batches[-1].decode_steps.num_steps == 23
    assert {span.tokens for span in spans} == {2}
    assert {batch.pipeline_depth for batch in watchers.batches} == {2}
    assert len({batch.started for batch in watchers.batches}) == 1


def test_nothing_is_made_while_nothing_watches():
    """Without a watcher no span is kept, also not for a later flush."""
    watchers = FakeWatchers(watched=False)
    stream, _ = streamed(watchers, 24)
    stream.flush()
    assert watchers.batches == []


def test_idle_spans_are_the_gaps_of_the_device():
    """Between launches of a busy engine the idle lane has what the device waited."""
    watchers = FakeWatchers(watched=True)
    stream, _ = streamed(watchers, 3)
    stream.flush()
    idle = [s for batch in watchers.batches for s in batch.spans if s.lane == "device idle"]
    assert [s.duration for s in idle if s.launch == 1] == [2 * MS, MS]
    assert [s.duration for s in idle if s.launch == 0] == [MS]


def test_a_blocking_loop_leaves_the_device_idle_between_decodes():
    """A decode has work from the commit before on; a prefill may have come after a pause."""
    for kind, gaps in ((LaunchKind.DECODE, [2, 1]), (LaunchKind.PREFILL, [1])):
        maker = SpanMaker()
        for index in range(2):
            step = make_step(index, kind=kind)
            step.record.commit_end = step.record.plan_start  # before the next one is planned
            spans = maker.spans(step)
        assert [s.duration // MS for s in spans if s.lane == "device idle"] == gaps


def test_nothing_is_known_of_launches_that_were_not_watched():
    """After a break the device was not idle for as long."""
    maker = SpanMaker()
    maker.spans(make_step(0))
    idle = [s.duration for s in maker.spans(make_step(500)) if s.lane == "device idle"]
    assert idle == [MS]
