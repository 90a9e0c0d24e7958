"""The arithmetic of a load: due times, histograms, and what counts."""

import itertools
import statistics
import time

import pytest
from legato_client.load.plan import Plan, due_times
from legato_client.load.report import Histogram, Meter, Record, markdown


def test_constant_arrivals_are_evenly_spaced_over_all_senders():
    """The senders' shares interleave to one request every 1/rate seconds, and no more."""
    shares = [list(due_times("constant", 10, 1.0, share=i, shares=3)) for i in range(3)]
    assert sorted(itertools.chain(*shares)) == pytest.approx([i / 10 for i in range(10)])


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_callers():
    """Gaps have the mean 1/rate and a standard deviation as large; another seed gives others."""
    times = list(due_times("poisson", 1000, 20.0, share=1, shares=2))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 500, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 500, rel=0.1)
    assert times == list(due_times("poisson", 1000, 20.0, share=1, shares=2))
    assert times != list(due_times("poisson", 1000, 20.0, share=1, shares=2, seed=1))
    assert times != list(due_times("poisson", 1000, 20.0, share=0, shares=2))


def test_percentiles_are_those_of_the_durations():
    """Within a bucket's width of the exact ones, the extremes exact, merged or not."""
    durations = [index / 1000 for index in range(1, 1001)]
    parts = [Histogram(), Histogram()]
    for index, duration in enumerate(durations):
        parts[index % 2].add(duration)
    parts[0].merge(parts[1])
    whole = parts[0]
    for percent in (1, 50, 90, 99, 99.9):
        exact = durations[int(len(durations) * percent / 100) - 1]
        assert exact <= whole.percentile(percent) <= exact * (1 + 1 / 64)
    assert whole.percentile(100) == whole.maximum == 1.0
    assert whole.minimum == 0.001
    assert whole.mean == pytest.approx(0.5005)


def test_an_empty_histogram_has_no_percentiles():
    """Nothing counted is 0 throughout, not an error."""
    assert set(Histogram().summary_ms().values()) == {0}


def test_a_single_duration_is_every_percentile():
    """One duration is never reported as larger than it was."""
    histogram = Histogram()
    histogram.add(0.0123456)
    assert histogram.percentile(50) == histogram.percentile(99.9) == 0.0123456


def test_times_run_from_when_a_request_was_due():
    """A request sent late is charged with the lateness, which is told beside it."""
    now = time.monotonic()
    meter = Meter(now - 10, now + 60)
    watch = meter.expect(now - 2.0)
    watch.message(answers=False)
    watch.message(answers=True)
    watch.message(answers=True)
    watch.end()
    record = meter.record
    assert (record.due, record.completed, record.messages) == (1, 1, 3)
    assert (record.first.count, record.gap.count, record.latency.count) == (1, 1, 1)
    assert min(record.lag.minimum, record.first.minimum, record.latency.minimum) >= 2.0
    assert record.gap.maximum < record.first.minimum


def test_what_was_due_outside_of_the_window_is_no_request_of_it():
    """Its answers count for the throughput when they come within the window, its times never."""
    now = time.monotonic()
    meter = Meter(now - 1, now + 60)
    for due in (now - 2, now + 100):
        watch = meter.expect(due)
        watch.message(answers=True)
        watch.end()
    meter.expect(now - 2).fail("QUEUE_FULL")
    record = meter.record
    assert (record.due, record.latency.count, record.lag.count) == (0, 0, 0)
    assert (record.messages, record.completed, record.errors.total()) == (2, 2, 0)


def test_failures_are_counted_by_reason_and_give_no_time():
    """A refusal is quick: it must not make the latencies of answers look better."""
    now = time.monotonic()
    meter = Meter(now - 1, now + 60)
    for reason in ("QUEUE_FULL", "QUEUE_FULL", "DEADLINE_EXCEEDED"):
        meter.expect(now).fail(reason)
    total = Record()
    total.merge(meter.record)
    total.merge(meter.record)
    assert total.errors == {"QUEUE_FULL": 4, "DEADLINE_EXCEEDED": 2}
    assert total.latency.count == 0
    plan = Plan("somewhere", "unary", b"", rate=5, seconds=12, warm_up=2)
    assert "6 of 6 requests failed" in markdown(plan, total)
    assert total.figures(plan.window)["errors"] == dict(total.errors)
