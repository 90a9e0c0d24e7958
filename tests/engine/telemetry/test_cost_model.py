"""The cost model of pipelining."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.telemetry import predicted_speedup, row_share, zombie_tax

PUBLISHED = [  # streams, forward, forward of one stream, blocking, pipelined, L, predicted
    (1, 4.87, 4.87, 5.44, 5.10, 104, 0.057),
    (8, 6.66, 4.87, 7.52, 6.97, 113, 0.076),
    (32, 10.24, 4.87, 11.74, 10.52, 113, 0.111),
    (1, 2.45, 2.45, 3.11, 2.63, 115, 0.172),
    (8, 3.12, 2.45, 4.04, 3.30, 115, 0.222),
    (32, 3.80, 2.45, 5.55, 3.98, 104, 0.391),
]


@pytest.mark.parametrize(
    ("streams", "forward", "single", "blocking", "pipelined", "length", "expected"), PUBLISHED
)
def test_published_predictions(streams, forward, single, blocking, pipelined, length, expected):
    """The model gives the published predictions from the published parts."""
    tax = zombie_tax(length, row_share(forward, single, streams))
    assert predicted_speedup(blocking, pipelined, tax) - 1 == pytest.approx(expected, abs=0.002)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(1, 64), st.floats(1, 1000))
def test_tax_is_a_share(forward, single, streams, length):
    """The tax is between zero and one step in L, whatever the noise of the parts."""
    tax = zombie_tax(length, row_share(forward, single, streams))
    assert 0 <= tax <= 1 / length
    assert predicted_speedup(2.0, 1.0, tax) <= 2.0
