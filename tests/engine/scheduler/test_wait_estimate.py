"""The wait estimate."""

import pytest
from legato_engine.scheduler.wait_estimate import WaitEstimate


def test_nothing_is_predicted_before_a_completion() -> None:
    """Without a measured service time there is no estimate."""
    assert WaitEstimate().predict(waiting=100, rows_free=0, num_rows=4) is None


def test_a_free_row_means_no_wait() -> None:
    """Requests do not wait while there is a row for each."""
    estimate = WaitEstimate()
    estimate.completed(2.0)
    assert estimate.predict(waiting=0, rows_free=1, num_rows=4) == 0.0
    assert estimate.predict(waiting=3, rows_free=4, num_rows=4) == 0.0


def test_the_wait_grows_with_the_queue() -> None:
    """With all rows busy one request ends every `service / rows` seconds."""
    estimate = WaitEstimate()
    estimate.completed(2.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=4) == pytest.approx(0.5)
    assert estimate.predict(waiting=7, rows_free=0, num_rows=4) == pytest.approx(4.0)


def test_the_average_follows_slowly() -> None:
    """One outlier moves the estimate a little, many move it all the way."""
    estimate = WaitEstimate()
    estimate.completed(1.0)
    estimate.completed(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(2.0)
    for _ in range(100):
        estimate.completed(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(11.0, rel=0.01)
