"""The wait estimate."""

import pytest
from legato_engine.scheduler.queue import WaitEstimate


def test_nothing_is_predicted_before_a_completion() -> None:
    """Without a measured service time there is no estimate."""
    assert WaitEstimate().predict(waiting=100, rows_free=0, num_rows=4) is None


def test_a_free_row_means_no_wait() -> None:
    """Requests do not wait while there is a row for each."""
    estimate = WaitEstimate()
    estimate.record_completion(2.0)
    assert estimate.predict(waiting=0, rows_free=1, num_rows=4) == 0.0
    assert estimate.predict(waiting=3, rows_free=4, num_rows=4) == 0.0


def test_the_wait_grows_with_the_queue() -> None:
    """With all rows busy one request ends every `service / rows` seconds."""
    estimate = WaitEstimate()
    estimate.record_completion(2.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=4) == pytest.approx(0.5)
    assert estimate.predict(waiting=7, rows_free=0, num_rows=4) == pytest.approx(4.0)


def test_the_average_follows_slowly() -> None:
    """One outlier moves the estimate a little, many move it all the way."""
    estimate = WaitEstimate()
    estimate.record_completion(1.0)
    estimate.record_completion(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(2.0)
    for _ in range(100):
        estimate.record_completion(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(11.0, rel=0.01)


def test_free_rows_do_not_help_while_prompts_wait_for_each_other() -> None:
    """Two requests start in each 0.4 s although most rows are free: the sixth waits 1 s."""
    estimate = WaitEstimate()
    estimate.record_completion(0.5)
    for launch in range(4):
        estimate.record_start(2, waiting=10 - 2 * launch, now=0.4 * launch)
    assert estimate.predict(waiting=5, rows_free=14, num_rows=16) == pytest.approx(1.0)


def test_time_without_a_queue_is_not_between_starts() -> None:
    estimate = WaitEstimate()
    estimate.record_completion(0.1)
    estimate.record_start(1, waiting=0, now=0.0)
    estimate.record_start(1, waiting=1, now=60.0)
    estimate.record_start(1, waiting=0, now=60.2)
    assert estimate.predict(waiting=2, rows_free=8, num_rows=8) == pytest.approx(0.4)
